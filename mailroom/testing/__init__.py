"""For tests, users' and ours: follow a message all the way on the test's own connection, without daemon or sleep."""

from typing import TYPE_CHECKING, Any

from mailroom.packages.lazy import imported

if TYPE_CHECKING:
    from mailroom.testing.brokers import BrokerCase, NotConforming, conform
    from mailroom.testing.emptying import empty, empty_async
    from mailroom.testing.functions import (
        SentMessage,
        carry,
        carry_async,
        deliver,
        deliver_async,
        execute,
        execute_async,
        handle_all,
        handle_all_async,
        publish,
        publish_async,
        sent,
        sent_async,
        work,
        work_async,
    )
    from mailroom.testing.mail import AsyncMail, Mail
    from mailroom.testing.stepping import Failure, Worked

__all__ = [
    "AsyncMail",
    "BrokerCase",
    "Failure",
    "Mail",
    "NotConforming",
    "SentMessage",
    "Worked",
    "carry",
    "carry_async",
    "conform",
    "deliver",
    "deliver_async",
    "empty",
    "empty_async",
    "execute",
    "execute_async",
    "handle_all",
    "handle_all_async",
    "publish",
    "publish_async",
    "sent",
    "sent_async",
    "work",
    "work_async",
]

# Imported on demand: the plugin is loaded into every run of pytest where Mailroom is installed.
_HOMES = {
    "mailroom.testing.brokers": ("BrokerCase", "NotConforming", "conform"),
    "mailroom.testing.emptying": ("empty", "empty_async"),
    "mailroom.testing.functions": (
        *("SentMessage", "carry", "carry_async", "deliver", "deliver_async", "execute", "execute_async"),
        *("handle_all", "handle_all_async", "publish", "publish_async", "sent", "sent_async", "work", "work_async"),
    ),
    "mailroom.testing.mail": ("AsyncMail", "Mail"),
    "mailroom.testing.stepping": ("Failure", "Worked"),
}


def __getattr__(name: str) -> Any:
    return imported(__name__, _HOMES, name)
