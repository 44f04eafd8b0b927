"""Messages as a bridge reads them, by hand and by chance."""

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from hypothesis import strategies as st

from mailroom.bridges.arrival import Arrived
from mailroom.bridges.record import Carried, Form, Record, Sender
from mailroom.message.headers import size
from mailroom.values import codec
from mailroom.values.names import MAX_HEADERS_BYTES
from tests.message.test_codec import supported

SENDER = Sender(UUID("6b1d5a0e-3c52-4a57-8f0e-1c9d3f0a7b44"), "paris", 3)
ID = UUID("12345678-1234-5678-9abc-def012345678")
SENT = datetime(2026, 8, 2, 12, 30, 45, 123456, tzinfo=UTC)
PLACE = "brokers"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

FORMS = [
    Form(format=form, encode=encode) for form in ("cloudevents", "debezium", "plain") for encode in ("json", "cbor")
]


def message(value: object = "paid", **other: Any) -> Carried:
    """An event of the key k1, with a value as CBOR."""
    given: dict[str, Any] = {
        "seq": 5, "sent_clock": 77, "stamped_at": SENT, "message_id": ID, "topic": "order.paid", "key": "k1",
        "kind": "E", "message_type": "U", "event_type": None, "value": codec.encode(value), "value_json": None,
        "headers": None, "expires_at": None, "after_clock": None, "source": "shop", "sent_at": SENT,
    }  # fmt: skip
    return Carried(**given | other)


def arrived(record: Record) -> Arrived:
    """A record as it comes back from the broker."""
    return Arrived(record.topic, 2, 41, record.key, record.value, record.headers, SENT)


storable = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
names = storable | st.sampled_from(["user", "traceparent", "id", "ID", "ce_id", "Content-Type", "mailroom-kind", ""])
times = st.integers(-62_135_596_800_000_000, 253_339_228_799_000_000).map(lambda us: EPOCH + timedelta(microseconds=us))
messages = st.builds(
    message,
    supported,
    seq=st.integers(1, 2**62),
    sent_clock=st.integers(1, 2**62),
    message_id=st.uuids(),
    topic=st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,30}", fullmatch=True),
    key=storable.filter(bool) | st.just(str(ID)),
    kind=st.sampled_from("MECR"),
    message_type=st.sampled_from("ODCU"),
    event_type=st.sampled_from(["C", "U", "D", None]),
    headers=st.none()
    | st.dictionaries(names, storable, min_size=1, max_size=4).filter(lambda each: size(each) <= MAX_HEADERS_BYTES),
    expires_at=st.none() | times,
    sent_at=times,
)
