"""A node of a cluster, and what it is doing."""

import socket
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple
from uuid import UUID, uuid4

DEFAULT_CLUSTER = "puzzledb"


class Status(StrEnum):
    """The status of a node. What a newer program writes, and this one does not know, is unknown."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    JOINING = "joining"
    UP = "up"
    DOWN = "down"
    LEAVING = "leaving"
    EXITING = "exiting"
    REMOVED = "removed"
    ABORTED = "aborted"
    UNREACHABLE = "unreachable"

    @classmethod
    def _missing_(cls, value: object) -> "Status":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Node:
    """A node, which is known by its id: a host may have several. The id stays the same over restarts.

    The cluster's name is also a part of a topic.
    """

    cluster: str = DEFAULT_CLUSTER
    host: str = field(default_factory=socket.gethostname)
    id: UUID = field(default_factory=uuid4)


class NodeState(NamedTuple):
    """What a node has said of itself, when, and the clock of the newest message that it has received."""

    node: Node
    status: Status
    clock: int
    at: datetime
