"""The daemon of Mailroom: stamps and delivers committed messages, and applies committed executables."""

from dispatcher.daemon import Dispatcher, Executed, Executor, Totals, drain, execute

__all__ = ["Dispatcher", "Executed", "Executor", "Totals", "drain", "execute"]
