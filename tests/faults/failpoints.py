"""Failpoints: named places at every statement, COMMIT and await of the product, without a hook in its code.

In a child process the runners of `mailroom.sql.runner` and two methods of psycopg are wrapped; a statement's name is
that of its `Sql` constant (`dispatcher.delivery.deliver.DELIVER`). One failpoint can be armed at a time: name, before
or after, action, and which pass. Passing an unarmed one costs a dictionary look-up.
"""

import asyncio
import inspect
import os
import random
import signal
import socket
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from functools import cache
from typing import Any

import psycopg
from psycopg.waiting import Wait

from inbox.sessions import hold, unawaited
from mailroom.sql import runner as transaction
from mailroom.sql.operation import Execute, Fill, Sql, Statement, Step, Together
from tests.faults import awaits

LINGERS_S = 4.0
PACKAGES = ("mailroom", "outbox", "inbox", "dispatcher")
COMMANDS = ("BEGIN", "COMMIT", "ROLLBACK")
RAW = ("LISTEN", "SELECT 1")  # what the product executes on a connection of its own, without the runner

# Which actions there are at which kind of place. Cut once the bytes are out, and cancelled by the server: only before.
BEFORE = (
    "raise", "bug", "kill", "terminate", "cut", "cut when sent", "cancel statement", "stop", "serialization failure",
)  # fmt: skip
AFTER = ("raise", "kill", "terminate", "cut", "stop")
AT_AWAIT = ("cancel", "raise", "kill", "stop")


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What is to happen where, at which pass."""

    name: str
    when: str
    action: str
    nth: int = 1


class InjectedBug(RuntimeError):
    """An error that no code expects."""


def names_of_statements() -> dict[int, str]:
    """Return the names of all `Sql` constants of the product's loaded modules, by identity."""
    names: dict[int, str] = {}
    for module, content in sorted(sys.modules.items()):
        if module.partition(".")[0] not in PACKAGES:
            continue
        for name, value in vars(content).items():
            # By `type`: the settings of Django, asked for their class, would want to be configured.
            for nth, each in enumerate(value if issubclass(type(value), tuple) else (value,)):
                if issubclass(type(each), Sql):
                    names.setdefault(id(each), f"{module}.{name}" + (f"[{nth}]" if each is not value else ""))
    return names


@cache
def names_at_the_fork() -> dict[int, str]:
    """Return the same as the nursery found it. To look through all modules took each child 20 ms."""
    return names_of_statements()


class Failpoints:
    """The failpoints of this process; `report` tells the campaign, `dsn` is for a second session that strikes ours."""

    def __init__(self, dsn: str, report: Callable[..., None]) -> None:
        self.passes: Counter[str] = Counter()
        self.coroutines: weakref.WeakSet[Any] = weakref.WeakSet()  # of the tasks
        self._dsn = dsn
        self._report = report
        self._armed: Failpoint | None = None
        self._left = 0
        self._names: dict[str, str] = {}  # by the text of the rendered statement
        self._when_sent: dict[int, str] = {}  # by connection: what is to happen once its next bytes are out
        self._lock = threading.Lock()

    def arm(self, failpoint: Failpoint | None) -> None:
        """Arm a failpoint in the place of the one that was, or none."""
        with self._lock:
            self._armed, self._left = failpoint, failpoint.nth if failpoint else 0

    # Where the wrapped code comes by.

    def at_step(self, connection: psycopg.BaseConnection[Any], step: Step, when: str) -> None:
        """Pass a step of an operation."""
        name = self._step_name(step)
        if name is not None:
            self.at(connection, name, when)

    def at(self, connection: psycopg.BaseConnection[Any], name: str, when: str) -> None:
        """Pass a failpoint of a connection; strike if it is the one that is armed."""
        if when == "before":
            self.passes[name] += 1
        if (armed := self._struck(name, when)) is None:
            return
        if name in COMMANDS and armed.action in ("raise", "bug"):
            # Only a connection that is lost makes these fail; psycopg itself relies on it when it rolls back.
            _shut(connection)
        match armed.action:
            case "raise":
                raise psycopg.OperationalError("injected")
            case "bug":
                raise InjectedBug("injected")
            case "serialization failure":
                raise random.choice([psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected])("injected")
            case "terminate":
                self._strike("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
            case "cancel statement":
                pid = connection.info.backend_pid
                threading.Thread(target=self._strike, args=("SELECT pg_cancel_backend(%s)", pid)).start()
                time.sleep(0.004)  # about as long as the other session takes to get there
            case "cut":
                _shut(connection)
            case "cut when sent" | "kill when sent":
                self._when_sent[id(connection)] = armed.action
            case _:
                _end_process(armed.action)

    def at_call(self, name: str, when: str) -> None:
        """Pass a call of another client than the database's; the process is killed or stopped there, or it lingers.

        Who lingers is the thread that calls, as one that gets no processor: the client's own threads go on.
        """
        if when == "before":
            self.passes[name] += 1
        if (armed := self._struck(name, when)) is None:
            return
        if armed.action == "linger":
            time.sleep(LINGERS_S)
        else:
            _end_process(armed.action)

    def suspended(self, coroutine: Any) -> BaseException | None:
        """Pass the awaits at which a task stands; returns what is to be thrown into it."""
        for name in awaits.standing_at(coroutine):
            self.passes[name] += 1
            if (armed := self._struck(name, "at")) is None:
                continue
            match armed.action:
                case "raise":
                    return psycopg.OperationalError("injected")
                case "cancel":
                    task = asyncio.current_task()
                    assert task is not None
                    task.cancel()
                case _:
                    _end_process(armed.action)
        return None

    def cutting(self, connection: psycopg.BaseConnection[Any], work: Any) -> Any:
        """Return the driver's generator `work`, ended between sending and the answer if that was asked for."""
        action = self._when_sent.pop(id(connection), None)
        return work if action is None else _ended_once_sent(connection, work, action)

    def _struck(self, name: str, when: str) -> Failpoint | None:
        armed = self._armed
        if armed is None or armed.name != name or armed.when != when:
            return None
        with self._lock:
            if self._armed is not armed:
                return None
            self._left -= 1
            if self._left > 0:
                return None
            self._armed = None
        self._report(hit=name, when=when, action=armed.action)
        return armed

    def _step_name(self, step: Step) -> str | None:
        match step:
            case Execute(statement, _):
                return self._named(statement)
            case Fill(_, copy, _, _, _):
                return self._named(copy)
        return None

    def _named(self, statement: Statement) -> str:
        return self._names.get(statement.sql, "?")

    def _strike(self, query: str, pid: int) -> None:
        try:
            with psycopg.connect(self._dsn, autocommit=True, application_name="faults strike") as other:
                other.execute(query.encode(), [pid])
        except psycopg.Error:
            pass  # the server is down: struck anyway

    def install(self) -> None:
        """Wrap the runner, the driver's commands and the event loop's tasks, in this process."""
        known = names_at_the_fork()
        render = Sql.at

        def at(sql: Sql, **names: str) -> Statement:
            statement = render(sql, **names)
            if statement.sql not in self._names:
                self._names[statement.sql] = known.get(id(sql), "?")
            return statement

        _replace((Sql, "at", at))
        self._wrap_runner()
        self._wrap_commands()
        asyncio.set_event_loop_policy(_Policy(self))

    def _wrap_runner(self) -> None:
        step, async_step, post = transaction._psycopg_step, transaction._async_psycopg_step, unawaited.send
        beginning_step, whole = transaction._beginning_step, transaction._run_whole

        def wrapped(connection: psycopg.Connection[Any], one: Step, **options: Any) -> list[Any]:
            self.at_step(connection, one, "before")
            rows = step(connection, one, **options)
            self.at_step(connection, one, "after")
            return rows

        async def async_wrapped(connection: psycopg.AsyncConnection[Any], one: Step, **options: Any) -> list[Any]:
            self.at_step(connection, one, "before")
            rows = await async_step(connection, one, **options)
            self.at_step(connection, one, "after")
            return rows

        async def beginning_wrapped(connection: psycopg.AsyncConnection[Any], one: Step, **options: Any) -> list[Any]:
            # With values it sends BEGIN, and then comes by as any other step.
            together = isinstance(one, Execute) and not one.values
            for name in ("BEGIN", self._step_name(one)) if together else ("BEGIN",):
                self.at(connection, name or "?", "before")
            rows = await beginning_step(connection, one, **options)
            for name in ("BEGIN", self._step_name(one)) if together else ("BEGIN",):
                self.at(connection, name or "?", "after")
            return rows

        async def whole_wrapped(connection: psycopg.AsyncConnection[Any], one: Together) -> list[Any]:
            names = ["BEGIN", *(self._named(each.statement) for each in one.steps), "COMMIT"]
            for name in names:
                self.at(connection, name, "before")
            rows = await whole(connection, one)
            for name in names:
                self.at(connection, name, "after")
            return rows

        def posted(connection: psycopg.Connection[Any], one: Execute) -> None:
            self.at_step(connection, one, "before")
            post(connection, one)
            if (action := self._when_sent.pop(id(connection), None)) is not None:
                _end_once_sent(connection, action)
            self.at_step(connection, one, "after")

        _replace(
            (transaction, "_psycopg_step", wrapped),
            (transaction, "_async_psycopg_step", async_wrapped),
            (transaction, "_beginning_step", beginning_wrapped),
            (transaction, "_run_whole", whole_wrapped),
            (unawaited, "send", posted),
        )

    def _wrap_commands(self) -> None:
        command, execute = psycopg.BaseConnection._exec_command, psycopg.AsyncConnection.execute
        wait, async_wait = psycopg.Connection.wait, psycopg.AsyncConnection.wait
        plain, async_plain = transaction.PlainCursor.execute, transaction.AsyncPlainCursor.execute

        def wrapped_command(connection: Any, text: Any, *rest: Any, **options: Any) -> Any:
            word = bytes(text).split()[0].decode().upper() if isinstance(text, bytes) else ""
            if word not in COMMANDS:
                return (yield from command(connection, text, *rest, **options))
            self.at(connection, word, "before")
            result = yield from self.cutting(connection, command(connection, text, *rest, **options))
            self.at(connection, word, "after")
            return result

        async def wrapped_execute(connection: Any, query: Any, *rest: Any, **options: Any) -> Any:
            text = (
                query if isinstance(query, str) else query.as_string(connection) if hasattr(query, "as_string") else ""
            )
            name = next((raw for raw in RAW if text.startswith(raw)), None)
            if name is None:
                return await execute(connection, query, *rest, **options)
            self.at(connection, name, "before")
            result = await execute(connection, query, *rest, **options)
            self.at(connection, name, "after")
            return result

        def wrapped_plain(cursor: Any, query: Any, *rest: Any, **options: Any) -> Any:
            if query != hold.COMMIT:
                return plain(cursor, query, *rest, **options)
            self.at(cursor.connection, "COMMIT", "before")
            result = plain(cursor, query, *rest, **options)
            self.at(cursor.connection, "COMMIT", "after")
            return result

        async def wrapped_async_plain(cursor: Any, query: Any, *rest: Any, **options: Any) -> Any:
            if query != hold.COMMIT:
                return await async_plain(cursor, query, *rest, **options)
            self.at(cursor.connection, "COMMIT", "before")
            result = await async_plain(cursor, query, *rest, **options)
            self.at(cursor.connection, "COMMIT", "after")
            return result

        def wrapped_wait(connection: Any, work: Any, *rest: Any, **options: Any) -> Any:
            return wait(connection, self.cutting(connection, work), *rest, **options)

        async def wrapped_async_wait(connection: Any, work: Any, *rest: Any, **options: Any) -> Any:
            return await async_wait(connection, self.cutting(connection, work), *rest, **options)

        _replace(
            (psycopg.BaseConnection, "_exec_command", wrapped_command),
            (psycopg.AsyncConnection, "execute", wrapped_execute),
            (transaction.PlainCursor, "execute", wrapped_plain),
            (transaction.AsyncPlainCursor, "execute", wrapped_async_plain),
            (psycopg.Connection, "wait", wrapped_wait),
            (psycopg.AsyncConnection, "wait", wrapped_async_wait),
        )


class _Policy(asyncio.DefaultEventLoopPolicy):
    """Makes loops whose tasks come by the failpoints at each suspension."""

    def __init__(self, failpoints: Failpoints) -> None:
        super().__init__()
        self._failpoints = failpoints

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()

        def factory(
            loop: asyncio.AbstractEventLoop,
            coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
            **rest: Any,
        ) -> asyncio.Task[Any]:
            if inspect.iscoroutine(coroutine):  # the end of an async generator comes as something else
                self._failpoints.coroutines.add(coroutine)

            async def driven() -> Any:
                return await awaits.Driven(coroutine, self._failpoints.suspended)

            return asyncio.Task(driven(), loop=loop, **rest)

        loop.set_task_factory(factory)
        return loop


def _replace(*attributes: tuple[object, str, object]) -> None:
    for owner, name, value in attributes:
        setattr(owner, name, value)


def _shut(connection: psycopg.BaseConnection[Any]) -> None:
    try:
        with socket.socket(fileno=os.dup(connection.pgconn.socket)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
    except (OSError, psycopg.OperationalError):
        pass  # it was lost already


def _end_once_sent(connection: psycopg.BaseConnection[Any], action: str) -> None:
    if action == "kill when sent":
        _end_process("kill")
    _shut(connection)


def _ended_once_sent(connection: psycopg.BaseConnection[Any], work: Any, action: str) -> Any:
    value: Any = None
    trips = 0
    while True:
        try:
            state = work.send(value)
        except StopIteration as stop:
            return stop.value
        trips += 1
        if trips > 0 and (state == Wait.R or trips > 1):
            time.sleep(random.uniform(0, 0.004))  # the server may get as far as committing, or not
            _end_once_sent(connection, action)
            trips = -1_000_000
        value = yield state


def _end_process(action: str) -> None:
    # Stopped, it goes on here once the campaign lets it.
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
