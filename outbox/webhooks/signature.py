"""Signatures of webhooks, as Standard Webhooks has them: v1, HMAC-SHA256 of `id.timestamp.body`.

Several secrets are given while one is replaced by another: the sender signs with all of them, and for the receiver it
is enough that one fits.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.values.names import shown

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
PREFIX = "whsec_"
LEAST_BYTES = 24  # of a secret, as the specification has it
TOLERANCE_S = 300  # how far a sender's clock may be from ours, and for how long a recorded request is of any use

SECONDS = re.compile(r"[0-9]{1,12}\Z")


class SignatureRefused(MailroomError):
    """A request is not signed, or not by who has a secret, or not lately."""


def secret_bytes(secrets: Sequence[str]) -> list[bytes]:
    """Return the bytes of secrets `whsec_<base64>`. Raises `ConfigurationError`, which does not repeat them."""
    return [_decoded(secret, nth) for nth, secret in enumerate(secrets, start=1)]


def _decoded(secret: str, nth: int) -> bytes:
    try:
        if not secret.startswith(PREFIX):
            raise ValueError
        text = secret.removeprefix(PREFIX).rstrip("=")  # some senders leave the padding out
        found = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (AttributeError, ValueError, binascii.Error):
        found = b""
    if len(found) < LEAST_BYTES:
        # Not chained: the cause may quote it.
        raise ConfigurationError(
            f"Secret {nth} is not {PREFIX} and then the base64 of at least {LEAST_BYTES} random bytes. Copy it as the "
            f"sender shows it, or make one: echo {PREFIX}$(openssl rand -base64 32)",
            code="MR-webhook-secret-invalid",
        ) from None
    return found


# D-bridges-22: What signs a webhook is its id, not the `Idempotency-Key`.
def sign(id: str, timestamp: int, body: bytes, secrets: Sequence[str]) -> str:
    """Return the header `webhook-signature` of a request: a signature by each of the secrets.

    `timestamp` is that of the attempt, in seconds since 1970. Raises `ConfigurationError` for a secret that is none,
    and `ValueError` for an id with a dot: what is signed could then be read in two ways.
    """
    if "." in id:
        raise ValueError(f"the id {shown(id)} has a dot")
    signed = f"{id}.{timestamp}.".encode() + body
    digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in secret_bytes(secrets))
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def check_stamp(headers: Mapping[str, str], now: float) -> tuple[str, int]:
    """Return id and time of a request that says that it is signed, and was sent within 5 minutes of `now`.

    It needs no body, so it is looked at before that is read. Raises `SignatureRefused`.
    """
    if missing := [name for name in (ID, TIMESTAMP, SIGNATURE) if not headers.get(name)]:
        raise SignatureRefused(
            f"The request has no {', '.join(missing)}: sign it as Standard Webhooks says.",
            code="MR-webhook-signature-missing",
        )
    id, timestamp = headers[ID], headers[TIMESTAMP]
    # A dot in the id, or something else than digits, and one signature would stand for two requests.
    if "." in id or not SECONDS.match(timestamp):
        raise SignatureRefused(
            f"{ID} has no dots, and {TIMESTAMP} is seconds since 1970, in digits.", code="MR-webhook-signature-missing"
        )
    if abs(now - int(timestamp)) > TOLERANCE_S:
        raise SignatureRefused(
            f"{TIMESTAMP} is more than {TOLERANCE_S} s from this server's clock: sign each attempt anew, and set the "
            "clock.",
            code="MR-webhook-signature-stale",
        )
    if not _given(headers):
        raise _unfit()
    return id, int(timestamp)


def verify(headers: Mapping[str, str], body: bytes, secrets: Sequence[str], now: float) -> str:
    """Return the id of a request that is signed by one of the secrets, and was sent within 5 minutes of `now`.

    `headers` have names in lower case; `body` is as it was received, and `now` in seconds since 1970. Raises
    `SignatureRefused`: a header is missing, it is too old or of the future, or no signature fits.
    """
    id, timestamp = check_stamp(headers, now)
    given = _given(headers)
    wanted = [each.encode() for each in sign(id, timestamp, body, secrets).split(" ")]
    # All are compared, each in constant time: how long it takes tells nothing of which one fits, or how far.
    if sum(hmac.compare_digest(one, other) for one in wanted for other in given) == 0:
        raise _unfit()
    return id


def _given(headers: Mapping[str, str]) -> list[bytes]:
    # Only these: without secrets there is an empty text to compare with, which two blanks in the header would equal.
    # A digest of SHA-256 has 44 characters in base64.
    signatures = [each.encode() for each in headers[SIGNATURE].split(" ") if each.startswith("v1,")]
    return [each for each in signatures if len(each) == len("v1,") + 44]


def _unfit() -> SignatureRefused:
    return SignatureRefused(
        "No v1 signature in webhook-signature fits: check the secret, and that the body is signed byte for byte as "
        "it is sent.",
        code="MR-webhook-signature-wrong",
    )
