"""The daemon of Mailroom: stamps what writers committed and delivers it into inboxes."""

from dispatcher.daemon import Dispatcher, Totals, drain

__all__ = ["Dispatcher", "Totals", "drain"]
