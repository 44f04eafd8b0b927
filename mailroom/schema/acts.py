"""Acts: what somebody does to a node by hand. Each is declared here once.

An act is the words of its command, which the audit has as `action`; the method and the dashboard's button that do the
same write the same words. It says which purpose of `mailroom grant` may do it. What the dispatcher does by itself and
no command does stands under `dispatcher`. A test holds this list against the commands.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Act:
    """What is done, by the words of its command, and the purpose that may do it; None is the owner of the schema."""

    words: str
    purpose: str | None = None

    @property
    def verb(self) -> str:
        """What is done, such as `replay`: so the rights of the dashboard's users call it."""
        return self.words.rpartition(" ")[2]

    @property
    def of(self) -> str:
        """What it is done to, such as `parked`."""
        return self.words.rpartition(" ")[0]


LOG_CREATE = Act("log create")
LOG_SET = Act("log set")
LOG_DROP = Act("log drop")

INBOX_CREATE = Act("inbox create")
INBOX_SET = Act("inbox set")
INBOX_SUBSCRIBE = Act("inbox subscribe")
INBOX_UNSUBSCRIBE = Act("inbox unsubscribe")
INBOX_RENAME = Act("inbox rename")
INBOX_DROP = Act("inbox drop")
INBOX_PAUSE = Act("inbox pause", "operator")
INBOX_RESUME = Act("inbox resume", "operator")
INBOX_RETRY = Act("inbox retry", "operator")
INBOX_REWIND = Act("inbox rewind")

PARKED_REPLAY = Act("parked replay", "operator")
PARKED_DISCARD = Act("parked discard", "operator")
ARCHIVE_REPLAY = Act("archive replay", "operator")
DEAD_LETTER_REQUEUE = Act("dead-letter requeue", "operator")
DEAD_LETTER_DISCARD = Act("dead-letter discard", "operator")
OUTBOX_CANCEL = Act("outbox cancel", "operator")

PERIODIC_ADD = Act("periodic add", "operator")
PERIODIC_SET = Act("periodic set", "operator")
PERIODIC_PAUSE = Act("periodic pause", "operator")
PERIODIC_RESUME = Act("periodic resume", "operator")
PERIODIC_REMOVE = Act("periodic remove", "operator")

LINK_ADD = Act("link add")
LINK_ALLOW = Act("link allow")
LINK_CUT = Act("link cut")
LINK_EXCLUDE = Act("link exclude")
LINK_INCLUDE = Act("link include")
LINK_MOVED = Act("link moved")
LINK_REMOVE = Act("link remove")
LINK_RESUME = Act("link resume")
LINK_SET = Act("link set")

BRIDGE_IN = Act("bridge in")
BRIDGE_OUT = Act("bridge out")
BRIDGE_CUT = Act("bridge cut")
BRIDGE_REMOVE = Act("bridge remove")
BRIDGE_RESUME = Act("bridge resume")
BRIDGE_SET = Act("bridge set")
BRIDGE_SKIP = Act("bridge skip")

TARGET_ADD = Act("executor target add")
TARGET_REMOVE = Act("executor target remove")
FUNCTION_ADD = Act("executor function add")
FUNCTION_REMOVE = Act("executor function remove")

NODE_ADVANCE = Act("node advance")
NODE_MOVED = Act("node moved")
NODE_NEW_ID = Act("node new-id")
NODE_RENAME = Act("node rename")
NODE_RESTORED = Act("node restored")

MIGRATE = Act("migrate")
WATCH = Act("watch")
UNWATCH = Act("unwatch")
GRANT = Act("grant")
REVOKE = Act("revoke")

# What the dispatcher does of its own accord, and no command.
NEW_LINK = Act("dispatcher new-link")
NEW_INCARNATION = Act("dispatcher new-incarnation")
SOURCE_LOST = Act("dispatcher source-lost")

ACTS = tuple(value for value in dict(vars()).values() if isinstance(value, Act))
