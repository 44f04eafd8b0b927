"""Signatures of webhooks: the vectors of Standard Webhooks, rotation, and what is refused."""

from collections.abc import Sequence

import pytest

from mailroom.errors import ConfigurationError
from outbox.webhooks.signature import SignatureRefused, secret_bytes, sign, verify
from tests.support.listed import listed

# Those of the specification's own libraries.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
ID, AT, BODY = "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
OTHER = "whsec_" + "QUJD" * 8


def headers(**changes: str | None) -> dict[str, str]:
    found = {"webhook-id": ID, "webhook-timestamp": str(AT), "webhook-signature": SIGNATURE}
    changed = found | {name.replace("_", "-"): value for name, value in changes.items()}
    return {name: value for name, value in changed.items() if value is not None}


def refusal(
    given: dict[str, str], body: bytes = BODY, secrets: Sequence[str] = (SECRET,), now: float = AT
) -> tuple[str, str]:
    with pytest.raises(SignatureRefused) as raised:
        verify(given, body, secrets, now)
    assert SECRET not in str(raised.value)
    return raised.value.code.removeprefix("MR-webhook-signature-"), str(raised.value)


def test_vector_of_the_specification_is_signed_and_verified() -> None:
    assert sign(ID, AT, BODY, [SECRET]) == SIGNATURE
    assert verify(headers(), BODY, [SECRET], AT) == ID


def test_while_a_secret_is_rotated_one_that_fits_is_enough_on_either_side() -> None:
    both = sign(ID, AT, BODY, [OTHER, SECRET])
    assert both.split(" ")[1] == SIGNATURE
    for signature, secrets in ((both, [SECRET]), (both, [OTHER]), (SIGNATURE, [OTHER, SECRET])):
        assert verify(headers(webhook_signature=signature), BODY, secrets, AT) == ID
    assert verify(headers(webhook_signature=f"v1a,AAAA {SIGNATURE} nonsense"), BODY, [SECRET], AT) == ID


@listed(
    ("change", "body"),
    [
        ({"webhook_id": "msg_other"}, BODY),
        ({"webhook_timestamp": str(AT + 1)}, BODY),
        ({}, BODY + b" "),
        ({"webhook_signature": SIGNATURE[:-2] + "A="}, BODY),
        ({"webhook_signature": SIGNATURE.replace("v1,", "v2,")}, BODY),
        ({"webhook_signature": SIGNATURE.replace("v1,", "")}, BODY),
        ({"webhook_signature": "v1,"}, BODY),
        ({"webhook_signature": "v1,\N{LATIN SMALL LETTER E WITH ACUTE}"}, BODY),
    ],
)
def test_what_was_changed_after_signing_is_refused(change: dict[str, str], body: bytes) -> None:
    assert refusal(headers(**change), body)[0] == "wrong"


def test_secret_that_is_not_known_fits_nothing() -> None:
    assert refusal(headers(), secrets=[OTHER])[0] == "wrong"
    for signature in (SIGNATURE, f" {SIGNATURE}  ", " "):
        assert refusal(headers(webhook_signature=signature), secrets=[])[0] == "wrong"


@listed("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_missing_header_is_named(name: str) -> None:
    for missing in (None, ""):
        code, text = refusal(headers(**{name.replace("-", "_"): missing}))
        assert code == "missing"
        assert name in text


@listed("timestamp", ["soon", "-5", "1614265330.0", " 1614265330", "\N{SUPERSCRIPT TWO}", "9" * 13])
def test_timestamp_is_digits(timestamp: str) -> None:
    assert refusal(headers(webhook_timestamp=timestamp))[0] == "missing"


def test_one_signature_never_stands_for_two_requests() -> None:
    signature = sign(ID, AT, f"{AT}.1".encode(), [SECRET])  # signs the same text as the id below with the body 1
    assert refusal(headers(webhook_id=f"{ID}.{AT}", webhook_signature=signature), b"1")[0] == "missing"
    with pytest.raises(ValueError, match="dot"):
        sign("a.b", AT, BODY, [SECRET])


def test_attempt_is_good_for_five_minutes_before_and_after() -> None:
    for away in (-300, 300):
        assert verify(headers(), BODY, [SECRET], AT + away) == ID
        assert refusal(headers(), now=AT + away * 1.01)[0] == "stale"


def test_time_counts_before_the_signature_is_computed() -> None:
    assert refusal(headers(webhook_signature="v1,no"), now=AT + 301)[0] == "stale"


def test_padding_may_be_left_out() -> None:
    padded = "whsec_" + "QUJD" * 8 + "QQ=="
    assert secret_bytes([padded]) == secret_bytes([padded.rstrip("=")]) == [b"ABC" * 8 + b"A"]


@listed("secret", ["", "whsec_", "QUJD" * 8, "whsec_" + "QUJD" * 7, "whsec_" + "Q!JD" * 9, "whsec_A", 5])
def test_secret_that_is_none_is_refused_without_being_shown(secret: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^Secret 2 is not whsec_ and then") as raised:
        sign(ID, AT, BODY, [SECRET, secret])
    assert raised.value.code == "MR-webhook-secret-invalid"
    assert raised.value.__suppress_context__
    assert "JD" not in str(raised.value)
