"""The same work: a publisher encodes a dict of each message, and each reader decodes it into an object.

What is measured is the processor time of a message: that of all processes and of their sessions on the server, while
the publisher stays a bounded distance ahead. What the server does for all, such as writing its log, is not in it. A
dict has 200 bytes as JSON, or as CBOR with us. The publisher's part is divided by the messages that it has sent, the
rest by those that were handled.

With one reader we have two workers, the queue by hand two consumers, and PgQ the one that it allows. Ten readers get
each message: ten consumers of PgQ, ten tables by hand, and ten inboxes with a worker each. The time is that of a
message with all of its copies.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import nan
from typing import Any, TypeAlias

import psycopg

from inbox import Message

from . import peer_handwritten, peer_pgq
from .live_side import SESSIONS
from .log_node import reading_node
from .measure import Setup
from .node import Node, fresh_node
from .pipeline import AHEAD, PUBLISHER, Count, Handler, Pipeline
from .processor import spent_us

READERS = 10
WORKERS = 2
PUBLISHING = f"mailroom {PUBLISHER}"
ROLES = (*SESSIONS, *(f"mailroom {role}" for role in (peer_pgq.TICKER, peer_pgq.CONSUMER)))

Running: TypeAlias = AbstractContextManager[tuple[Pipeline, Count]]


def _decoding(count: Count) -> Handler:
    def handle(message: Message, _connection: psycopg.Connection[Any]) -> None:
        message.value  # noqa: B018 - it is decoded when it is asked for
        count.add(1)

    return handle


@contextmanager
def _ours(node: Node, inboxes: list[str], ahead: int) -> Iterator[tuple[Pipeline, Count]]:
    readers = len(inboxes)
    with Pipeline(node) as pipeline:
        pipeline.dispatch()
        for inbox in inboxes:
            pipeline.work(WORKERS if readers == 1 else 1, _decoding, inbox=inbox)
        yield pipeline, pipeline.publish(sys.maxsize, ahead=ahead, readers=readers)


def ours_us(kind: str, setup: Setup, readers: int = 1) -> float:
    """Return the microseconds of a message with us, over inboxes of that kind: "by key" or "log"."""
    with reading_node(setup, kind, readers) as (node, inboxes):
        return _spent_us(partial(_ours, node, inboxes), setup, readers)


def pgq_us(setup: Setup, readers: int = 1) -> float:
    """Return the same for PgQ."""
    with fresh_node(setup.dsn) as node:
        return _spent_us(partial(peer_pgq.same_work, node, sys.maxsize, readers=readers), setup, readers)


def handwritten_us(setup: Setup, readers: int = 1) -> float:
    """Return the same for the queue by hand."""
    with fresh_node(setup.dsn) as node:
        return _spent_us(partial(peer_handwritten.same_work, node, sys.maxsize, readers=readers), setup, readers)


def _spent_us(running: Callable[..., Running], setup: Setup, readers: int) -> float:
    messages = max(1, setup.messages // readers)
    # As far for ten readers as for one, or their batches would be smaller.
    ahead = min(AHEAD, max(1, setup.messages // 5))
    with running(ahead=ahead) as (pipeline, sent):
        handled, had, before = _read(pipeline, sent, ahead * readers)
        handled_then, has, after = _read(pipeline, sent, handled + messages * readers)
    publishing = spent_us(before[0], after[0], has - had)
    # Of each message, so that the copies of ten readers are one message, for all who are compared.
    rest = spent_us(before[1], after[1], handled_then - handled) * readers
    return publishing + rest or nan  # no other system tells what other processes use


def _read(pipeline: Pipeline, sent: Count, handled: int) -> tuple[int, int, list[dict[int, float]]]:
    """Return how many were handled once that many are, how many were sent, and what publishing and the rest have used.

    What each process has used is given in seconds by process id.
    """
    pipeline.wait_handled(handled)
    used = pipeline.used_s(*ROLES)
    publisher = pipeline.publisher.pid if pipeline.publisher else None
    publishing = used.keys() & {publisher, *pipeline.sessions(PUBLISHING)}
    parts = [{pid: used[pid] for pid in part} for part in (publishing, used.keys() - publishing)]
    return pipeline.handled, sent.value, parts
