"""A dashboard: pages that show a node in a browser, and let an operator act. An ASGI app, for the extra `dashboard`."""

from dispatcher.dashboard.access import ACTIONS, EVERYTHING, READ_ONLY, ProxyHeader, Tokens, User
from dispatcher.dashboard.asgi import app

__all__ = ["ACTIONS", "EVERYTHING", "READ_ONLY", "ProxyHeader", "Tokens", "User", "app"]
