"""The daemon of Mailroom: stamps and delivers committed messages, and applies committed executables."""

from dispatcher.daemon import Dispatcher, Executed, Executor, Totals, deliver_all, execute_all
from dispatcher.executor.registration import AsyncRegistrations, RegisteredFunction, RegisteredTarget, Registrations

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
