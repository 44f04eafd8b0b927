"""tests/data/golden_records.txt, records byte for byte: `python -m tests.golden_records` writes it.

Programs in other languages read such records. So a line that changes is a change that they meet.
"""

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

from mailroom.bridges.record import Carried, Form, record_of
from tests.bridges.messages import ID, SENDER, SENT, message

GOLDEN = Path(__file__).parent / "data" / "golden_records.txt"
ORDER = {
    "order": "order-42",
    "state": "Zürich \0",
    "total": Decimal("129.950"),
    "paid_at": datetime(2026, 8, 2, 12, 30, 45, tzinfo=UTC),
    "due": date(2026, 9, 1),
    "lines": [{"sku": b"A-1", "count": 2, "weight": 0.5, "id": ID}],
    "coupon": None,
    "most": float("inf"),
    b"raw": True,
}
HEADERS = {"user": "ada", "city": "Zürich", "traceparent": "00-0af7-b7ad-01", "ce_id": "mine", "two words": "a\nb"}
FULL = message(
    ORDER, kind="C", message_type="O", event_type="D", headers=HEADERS, expires_at=SENT + timedelta(hours=1)
)  # fmt: skip
UNORDERED = message(None, key=str(ID), message_type="D", event_type="C")
BY_SQL = replace(message(), value=None, value_json='{"n": 12345678901234567890123, "x": [1.50, null]}')
RECORDS: dict[str, tuple[Carried, Form]] = {
    "cloudevents_json": (FULL, Form()),
    "cloudevents_cbor": (FULL, Form(encode="cbor")),
    "cloudevents_unordered": (UNORDERED, Form()),
    "cloudevents_tombstone": (FULL, Form(tombstones=True)),
    "cloudevents_value_json": (BY_SQL, Form()),
    "debezium_json": (FULL, Form(format="debezium")),
    "debezium_value_json_as_cbor": (BY_SQL, Form(format="debezium", encode="cbor")),
    "plain_json": (FULL, Form(format="plain", topic="shop.{topic}.v1")),
    "plain_tombstone": (FULL, Form(format="plain", tombstones=True)),
}


def golden() -> str:
    """Return the content of the file."""
    blocks = []
    for name, (carried, form) in RECORDS.items():
        record = record_of(carried, form, SENDER)
        lines = [name, f"  topic {record.topic}", f"  key {record.key!r}", f"  value {record.value!r}"]
        blocks.append("\n".join([*lines, *(f"  {header}: {text!r}" for header, text in record.headers)]))
    return "\n\n".join([__doc__ or "", *blocks, ""]).replace("\n\n\n", "\n\n")


if __name__ == "__main__":
    GOLDEN.write_text(golden())
