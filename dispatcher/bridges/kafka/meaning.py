"""What the client's errors mean: whom they concern, which of them pass by themselves, and what a person has to do."""

from confluent_kafka import KafkaError

# What the broker says of one record or one topic: no trying again helps before something is changed.
OF_THE_RECORD = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_RECORD,
        KafkaError.INVALID_MSG_SIZE, KafkaError.INVALID_TIMESTAMP, KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.TOPIC_EXCEPTION, KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._GAPLESS_GUARANTEE,  # with the broker's reason in its text
    }
)  # fmt: skip
REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._SSL,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.UNSUPPORTED_SASL_MECHANISM,
    }
)  # fmt: skip
FENCED = frozenset(
    {
        KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.TRANSACTION_COORDINATOR_FENCED,
    }
)  # fmt: skip
# What passes by itself.
PASSING = frozenset(
    {
        KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE,
        KafkaError._WAIT_COORD, KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.UNSTABLE_OFFSET_COMMIT, KafkaError.CONCURRENT_TRANSACTIONS,
    }
)  # fmt: skip
# What a transaction does with its records after an error that is told elsewhere.
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})

DENIED = "Broker: Topic authorization failed"
TOO_LARGE = "Broker: Message size too large"
# In the text of the client: the code is that of the guarantee that it cannot keep, or of a connection that was lost.
ADVICE = {
    "certificate verify failed": "Its certificate is of an authority that is not in ssl.ca.location, or is for another "
    "host than the address names.",
    "wrong version number": "What answers there speaks no TLS: see the address, and security.protocol.",
    "Broker: Invalid timestamp": "The clocks of node and broker differ, or the message has waited for longer than "
    "message.timestamp.before.max.ms of the topic allows.",
    "brokers are down": "If the address is right, see security.protocol: a listener with TLS or logins ends what comes "
    "without.",
    "Invalid response size": "What answers there is no Kafka, or wants TLS: see the address, and security.protocol.",
}


def advice(text: str, topics: str, own_name: str) -> str:
    """Return what to do about an error, after a space, or nothing.

    `topics` is the right that was used on topics, as in "Read on topic orders"; `own_name` that of the bridge's group
    and of its transactional id.
    """
    rights = {
        DENIED: topics,
        "Group authorization failed": f"Read on group {own_name}",
        "Transactional Id authorization failed": f"Write and Describe on transactional id {own_name}",
        # Whoever may write to some topic may do so idempotently, since Kafka 3.0.
        "Cluster authorization failed": f"{topics}; before Kafka 3.0 IdempotentWrite on the cluster, too",
    }
    found = [f"Grant the principal {right}." for part, right in rights.items() if part in text and right]
    found += [what for part, what in ADVICE.items() if part in text]
    if TOO_LARGE in text:
        found.append("Raise max.message.bytes of the topic.")
    return "".join(f" {each}" for each in found)
