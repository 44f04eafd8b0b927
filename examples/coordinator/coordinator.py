"""A coordinator: what a node posts to the others of its cluster, and what it does with what they post."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias
from uuid import UUID

from examples.coordinator import states
from examples.coordinator.node import Node, NodeState, Status
from examples.coordinator.states import Connection
from inbox import Message, Worker
from mailroom import create_inbox, subscribe, unsubscribe
from mailroom.message.outgoing import MessageType
from mailroom.puzzledb import MessageObject
from mailroom.values.names import topic_name
from outbox import Outbox

Observer: TypeAlias = Callable[[MessageObject, Connection], object]

OUTBOX = Outbox()
STATE_TOPICS = f"{states.TOPIC}.*"
NODE = "node"  # the type of the state objects that are nodes' states


def _now() -> datetime:
    return datetime.now(UTC)


class Coordinator:
    """What one node is to its cluster. All that it does with a connection is in that one's transaction.

    What a node posts is dropped if it is older than `max_age_s` seconds where it arrives, be it at the delivery or in
    the inbox of a node that was down. `now` is the clock on the wall. Raises `InvalidMessage` for a cluster whose name
    cannot be a part of a topic.
    """

    def __init__(self, node: Node, *, max_age_s: float = 3_600, now: Callable[[], datetime] = _now) -> None:
        self.node = node
        self.inbox = f"node_{node.id.hex}"
        self.topic = topic_name(f"coordinator.{node.cluster}")
        self._state_key = f"{node.cluster}/{node.id}"
        self._max_age = timedelta(seconds=max_age_s)
        self._now = now
        self._observers: list[Observer] = []

    # --- the cluster

    def join(self, connection: Connection) -> None:
        """Take part in the cluster: from now on messages of the others wait for this node, whether it runs or not.

        The table of `states` must be there.
        """
        create_inbox(connection, self.inbox, [self.topic])
        self.set_status(connection, Status.JOINING)

    def follow_states(self, connection: Connection) -> None:
        """Hear, too, of each state object that is created, updated or deleted, by any client: messages of type O.

        Their object is the CBOR of `{"old": row, "new": row, "changed": [...]}`. What happens to one state object is
        heard in order; there is no order between these and what is posted.
        """
        subscribe(connection, self.inbox, STATE_TOPICS)

    def leave(self, connection: Connection) -> None:
        """Receive nothing any more that is posted from now on."""
        unsubscribe(connection, self.inbox, [self.topic, STATE_TOPICS])
        self.set_status(connection, Status.REMOVED)

    def set_status(self, connection: Connection, status: Status) -> None:
        """Say what the node is doing."""
        content = {"host": self.node.host, "status": status}
        states.put(connection, NODE, self._state_key, content, self._now())

    def cluster_state(self, connection: Connection) -> list[NodeState]:
        """Return what the nodes of the cluster have said of themselves, by id."""
        return [_node_state(state) for state in states.find(connection, NODE, f"{self.node.cluster}/")]

    # --- messages

    def post(self, connection: Connection, kind: MessageType, event: str | None, content: bytes) -> None:
        """Send a message to all other nodes of the cluster; `content` is the object as CBOR."""
        node = self.node
        message = MessageObject(kind, event, content, node.id, node.cluster, node.host)
        # An event, since there may be no other node. One key, since all nodes receive all messages in one order.
        outgoing = message.outgoing(self.topic, key=node.cluster, kind="E", expires_at=self._now() + self._max_age)
        OUTBOX.send_many(connection, [outgoing])

    def add_observer(self, observer: Observer) -> None:
        """Call this function with each message that is received; adding it again changes nothing."""
        if observer not in self._observers:
            self._observers.append(observer)

    def receive(self, message: Message, connection: Connection) -> None:
        """Handle a message of the node's inbox: call the observers in the transaction that takes it.

        The node's own messages come back to it, and are passed over by its id: another node may be on the same host.
        If an observer fails, nothing of this has happened, and the message is received again before any later one.
        """
        states.advance(connection, NODE, self._state_key, message.clock, self._now())
        if message.expires_at is not None and message.expires_at <= self._now():
            return
        received = MessageObject.of(message)
        if received.from_id == self.node.id:
            return
        for observer in self._observers:
            observer(received, connection)

    def worker(self, dsn: str) -> Worker:
        """Return a worker that receives what arrives, and delivers if nobody else does."""
        return Worker(dsn, self.inbox, self.receive, dispatch=True, handle_signals=False)


def _node_state(state: states.State) -> NodeState:
    cluster, _, node_id = state.key.partition("/")
    node = Node(cluster, state.object["host"], UUID(node_id))
    return NodeState(node, Status(state.object["status"]), state.clock, state.at)
