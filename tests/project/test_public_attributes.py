"""The attributes of public classes: those that are listed here, so that a new one is a decision, are users' to use.

What is meant for other modules of ours is a function beside the class, or begins with an underscore.
"""

import ast
import inspect
from functools import cache
from importlib import import_module
from typing import TypeGuard

from django.db.migrations.operations.base import Operation as DjangoOperation

from mailroom.errors import MailroomError
from tests.project.test_public import LISTED, MODULES, PACKAGES

# An async class has those of its sync one, and an error of Mailroom those of `MailroomError`.
ATTRIBUTES = {
    "CommitUnknown": "token",
    "LamportClock": "clock history receive tick",
    "Arrived": "at fault headers id is_queued key leader_epoch log offset part place subject topic value",
    "MailroomSchema": "before revision",
    "CreateInbox": "inbox settings subscribe",
    "SetInbox": "before inbox settings",
    "Subscribe": "inbox topics",
    "BridgeStates": "into out",
    "Bridges": "cut into out remove resume schema set skip status waiting",
    "BrokerCase": "broker can_be_killed into kill options out records start",
    "NotConforming": "",
    "ApiBinding": "channel_in channel_out message of_schemes protocol",
    "Broker": "about address asyncapi check_address commands install is_installed is_queue is_reserved library name "
    "options otherwise publishes reserved reserved_prefixes sentence takes_from tested title",
    "OwnSetting": "check help metavar name",
    "PublishesTo": "client exactly_once formats is_asked order settings",
    "TakesFrom": "client order settings starts topics",
    "BrokerPosition": "leader_epoch log next part topic",
    "BrokerRefused": "code",
    "BrokerTrouble": "",
    "BrokerWasAway": "",
    "Fenced": "",
    "Form": "encode format tombstones topic",
    "InBridge": "name node_id options origin settings",
    "InSettings": "address broker flat intake is_kept made max_origins names of on_failure own start text topics",
    "InState": "flows lacks name positions received received_at settings since state topics why",
    "Intake": "as_topic decode key",
    "Numbered": "first last part topic",
    "Numbering": "ends numbered",
    "OutBridge": "link name node node_id options settings",
    "OutSettings": "address broker exactly_once flat form is_kept made mark_topic names of on_failure own text",
    "OutState": "acked backlog commands keep_s lag_s max_rows name seen_at settings since state topics why",
    "Partitioned": "parts",
    "PartsChanged": "",
    "PositionGone": "first position",
    "Publisher": "close keep open publish published trouble",
    "Record": "at clock headers id key parts seq topic value",
    "RecordRefused": "code",
    "RecordSource": "begin close open read taken trouble",
    "UnknownBridge": "",
    "Links": "add allow cut exclude include moved remove report resume resume_order schema set status wait",
    "NotAtomic": "",
    "Stamp": "clock is_stale what",
    "TokenExpired": "token",
    "Topic": "name periodic read read_answer typed upcast version write write_answer",
    "ProxyHeader": "",
    "Tokens": "",
    "User": "may name",
    "RightsChange": "inboxes kept statements",
    "Watched": "fault key_prefix table topic without",
    "carrying": "",
    "ConfigurationError": "",
    "ConnectionFailed": "",
    "DecodeError": "",
    "EmbeddedServerError": "",
    "EncodeError": "",
    "InvalidMessage": "",
    "InvalidName": "",
    "LinkRefused": "at command reason",
    "MailroomError": "code exit_code",
    "NoHandler": "",
    "NotInTransaction": "",
    "NotSubscribed": "",
    "SchemaError": "",
    "UnknownInbox": "",
    "UnknownLink": "",
    "UnknownPeriodic": "",
    "UnsupportedConnection": "",
    "MessagesSent": "messages schema topics",
    "MessagesDelivered": "carried dead delivered expired scheduled schema seconds taken unrouted",
    "DeliveryTraced": "schema seconds taken traceparents",
    "ExecutablesExecuted": "dead replied schema seconds taken",
    "MessagesExpired": "expired inbox schema",
    "MessagesLost": "inbox log lost schema",
    "MessagesPublished": "bridge published schema seconds",
    "MessagesReceived": "dead delivered expired known origin received schema seconds unrouted",
    "LeadershipChanged": "epoch leads role schema",
    "BatchClaimed": "due inbox messages schema seconds",
    "HandlerBegan": "inbox messages schema",
    "HandlerEnded": "error inbox messages schema seconds",
    "BatchEnded": "due handled_s inbox messages outcome schema seconds",
    "BreakerTurned": "inbox is_open prefix schema",
    "ClaimHeld": "inbox limit schema seconds",
    "AttemptFailed": "attempt error inbox message outcome schema",
    "TriedAgain": "error inbox reconnects role schema",
    "Instrumentor": "instrument uninstrument",
    "Collector": "close collect describe",
    "Endpoint": "close port",
    "MinuteStatistics": "age_p50_s age_p99_s batches delivered failed handle_s inbox minute parked reaped skipped",
    "InboxStatistics": "age_p50_s age_p99_s batches delivered failed handle_s inbox minutes parked reaped skipped",
    "Health": "has_begun name ready since state why",
    "LinkStates": "readers sources",
    "LinkMoved": "reader source",
    "ReaderState": (
        "acked allowed backlog commands id in_doubt keep_s lag_s last link max_rows name seen_at state topics"
    ),
    "Removed": "given_up name side",
    "LinkReport": "earlier lost more_lost name skipped state why",
    "Resumed": "at known skipped unknown was",
    "SourceState": (
        "flows id incarnation link name pending position reader received_at refused service shown since state "
        "topics why"
    ),
    "MessageObject": "clock dumps event from_cluster from_host from_id loads object of outgoing type",
    "NewId": "before id links origins rows",
    "Finding": "command evidence id what",
    "Limits": (
        "batch_s behind_xids bulk_s connections_share dead_times failing_s frozen_xids held_s lane_s late_s "
        "lease_s lock_s lost_s queue_share sequence_share set_back_s silent_s snapshot_s unled_s unread_s "
        "vacuum_s waiting_s wal_bytes"
    ),
    "DispatcherStatus": "counts epoch failing host leads lease_left_s origins pid role state",
    "InboxStatus": (
        "backlog breaker_opened_at breaker_why consumer_lag_s dispatcher_lag_s expired held_back is_stopped lag_s name "
        "on_the_way order parked_keys parked_messages paused_at paused_by paused_keys waiting_keys waits_for"
    ),
    "LaneFailure": "for_s run times why",
    "LinkStatus": "backlog lag_s name on_the_way state",
    "LogStatus": "bytes held_by held_bytes held_since name segments",
    "Status": (
        "behind bulk_backlog clock clock_ceiling database dead_letters dispatcher executable_backlog "
        "executable_lag_s executor inboxes links locked logs node outbox_backlog outbox_lag_s scheduled schema server "
        "set_back sources waits"
    ),
    "ClockSetBack": "at by_s keys",
    "AtWork": "lanes workers",
    "LaneSeen": "process release role since state",
    "WorkerSeen": "address backend host inbox last_batch_at messages pid release since state",
    "FailingKeys": "errors inbox keys retry schema",
    "FailingKey": "attempts inbox key reason retry_at since",
    "FailingError": "attempts error inbox keys reason retry_at waiting",
    "KeyPlaces": "is_nowhere key places states unread unseen",
    "KeyStanding": "attempts error inbox key paused_by retry_at since state",
    "LogUnread": "clock first inbox lane log unread",
    "Unseen": "place why",
    "Location": (
        "ahead attempts causation clock id inbox is_one_queue key link reason retry_at sent_at since topic where"
    ),
    "DeadLetterContent": "headers is_json raw value",
    "DeadLetter": (
        "attempts bridge clock expires_at failed_at id inbox key kind message_id reason sent_at source stage topic"
    ),
    "DeadLetters": "discard find get requeue schema",
    "Failure": "attempt due_in_s error message outcome",
    "SentMessage": "deliver_at event_type expires_at headers id key kind message_type topic value",
    "Worked": "failures handled",
    "EmptiesNode": "run",
    "Mail": "connection handle_all schema sent travel",
    "Binaries": "major path",
    "Condition": "bytes dsn is_kept is_used port",
    "Server": "condition database directory dsn end has_data keep runs start stop",
    "Books": "bytes count",
    "Executable": (
        "after_clock amount arguments at bytes end_key expected headers id key notify operation row_limit target value"
    ),
    "Outbox": "cancel command publish reply schema send send_many",
    "Outgoing": (
        "after_clock deliver_after deliver_at event_type expires_at headers id key kind message_type topic value"
    ),
    "Periodic": "add list next_times pause remove resume schema set sync",
    "PeriodicMessage": "cron headers jitter_s key kind missed name time_zone topic value",
    "PeriodicState": ("cron due_at jitter_s key kind last_at last_error missed name next_at paused time_zone topic"),
    "WebhookApp": "",
    "Store": "account books call delete delete_range get increment put schema send_many target",
    "Archive": "count find inbox may_see_values replay schema",
    "Attempt": "at attempt clock error key message_id outcome worker",
    "BatchHandler": "",
    "Changed": "freed keys messages",
    "Handlers": "on on_error_reply schema",
    "Inbox": (
        "backlog create drop inbox pause paused_keys peek reap reap_any rename resume rewind schema set subscribe "
        "unsubscribe wait_for_batches"
    ),
    "Message": (
        "clock delivered_at event_type expires_at headers id key kind message_type origin raw sent_at sent_clock "
        "source status topic value"
    ),
    "NoReply": "code",
    "Park": "",
    "Parked": "attempts discard inbox keys messages replay schema",
    "ParkedKey": "attempts clock key messages parked_at reason",
    "Reaped": "message reaped_at discarded",
    "Rewound": "clock is_short opened_at",
    "PausedKey": "is_parked key messages paused_at paused_by",
    "Pending": "id wait",
    "ErrorReply": "code status value",
    "Reject": "value",
    "Requests": "ask inbox schema send",
    "Retry": "after_s",
    "Skip": "",
    "Unavailable": "after_s",
    "Worker": "failure health healthy inbox run schema stop",
    "Dispatcher": "health run stop totals",
    "Executed": "dead replied taken",
    "Executor": "health run stop totals",
    "RegisteredFunction": "created_at fault function name timeout_s",
    "RegisteredTarget": "created_at fault key name number table value",
    "Registrations": "functions register_function register_target remove_function remove_target schema targets",
    "Totals": "carried dead delivered expired scheduled taken unrouted",
}


CLASSES = {
    name: value
    for module, names in LISTED.items()
    if module in MODULES
    for name in names
    if inspect.isclass(value := getattr(import_module(module), name))
}


def attributes(cls: type) -> set[str]:
    """The public attributes of a class: those it has, those it announces, and those that its methods set."""
    found = set(dir(cls))
    for each in cls.__mro__:
        found |= set(inspect.get_annotations(each))
        if each.__module__.partition(".")[0] in PACKAGES:
            found |= {node.attr for node in ast.walk(sources(each.__module__)[each.__name__]) if is_set_on_self(node)}
    return {name for name in found - inherited(cls) if not name.startswith("_")}


@cache
def sources(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module by their names."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def inherited(cls: type) -> set[str]:
    """What every exception has, every error of Mailroom, every tuple, or every operation of Django's migrations."""
    for base in (MailroomError, OSError, BaseException, tuple, DjangoOperation):
        if issubclass(cls, base) and cls is not base:
            return set(dir(base))
    return set()


def test_no_class_is_listed_that_is_not_public() -> None:
    assert {name.removeprefix("Async") for name in CLASSES} == set(ATTRIBUTES)


def test_public_attributes_of_classes_are_those_that_are_listed() -> None:
    found = {name: attributes(cls) for name, cls in CLASSES.items()}
    assert found == {name: set(ATTRIBUTES[name.removeprefix("Async")].split()) for name in CLASSES}
