"""The daemon of Mailroom: stamps and delivers what writers committed, and executes what is to be executed."""

from dispatcher.daemon import Dispatcher, Executed, Executor, Totals, drain, execute

__all__ = ["Dispatcher", "Executed", "Executor", "Totals", "drain", "execute"]
