"""The daemon of Mailroom: stamps and delivers committed messages, and applies committed executables."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from dispatcher.daemon import Dispatcher, Executed, Executor, Totals, deliver_all, execute_all
    from dispatcher.executor.targets.registration import (
        AsyncRegistrations,
        RegisteredFunction,
        RegisteredTarget,
        Registrations,
    )

__all__ = [
    "AsyncRegistrations",
    "Dispatcher",
    "Executed",
    "Executor",
    "RegisteredFunction",
    "RegisteredTarget",
    "Registrations",
    "Totals",
    "deliver_all",
    "execute_all",
]

# Imported on demand: a migration that registers a function need not load the daemon.
_HOMES = {
    "dispatcher.daemon": ("Dispatcher", "Executed", "Executor", "Totals", "deliver_all", "execute_all"),
    "dispatcher.executor.targets.registration": (
        *("AsyncRegistrations", "RegisteredFunction", "RegisteredTarget", "Registrations"),
    ),
}


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
