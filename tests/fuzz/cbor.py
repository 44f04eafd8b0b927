"""`python -m tests.fuzz.cbor`: hostile bytes for the CBOR reader; `make fuzz RUNS=1000000` calls it.

Whatever the bytes: a value that can be sent on and comes back equal, within the limits, or a `DecodeError` that shows
nothing of them. A run is repeated by its seed; what breaks a rule is kept as `crash-...` in the current directory.
"""

import math
import re
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from decimal import Context, Decimal
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import click

from mailroom.errors import DecodeError, EncodeError
from tests.message.test_codec import WRONG, golden

MAX_BYTES = 4_096
# All that an error may say: sizes, tags and names of types, never content.
WHERE = "(array|map|byte string|text string|unsigned integer|negative integer|semantic tag|special value)"
FAULTS = (
    r"it has more than \d+ items",
    r"more bytes follow after its end",
    r"it holds undefined or a simple value other than true, false and null",
    r"tag \d{1,20} is not one of 0, 1, 2, 3, 4, 37, 1004",
    r"a datetime has no time zone, or an offset with seconds",
    r"a decimal is not a pair of exponent and digits",
    r"a decimal has an exponent beyond 1000",
    r"a decimal has more than 1000 digits",
    r"it holds an integer beyond 64 bits outside of a decimal",
    r"a tag holds an? [A-Za-z]{2,15} where an? (int|str|bytes) belongs",
    r"premature end of stream \(expected to read at least \d+ bytes, got \d+ instead\)",
    r"maximum container nesting depth \(32\) exceeded",
    r"break code encountered where a data item was expected",
    r"error decoding map: Duplicate map key",
    r"error decoding map: map key must be a text string or byte string, not [A-Za-z]{2,15}",
    r"error decoding (text string|semantic tag \d{1,4}) \([A-Za-z]+Error\)",
    r"error decoding special value: invalid two-byte sequence for simple value",
    r"error decoding special value: undefined reserved major type 7 subtype 0x1[c-e]",
    rf"error decoding {WHERE}: encountered indefinite length but it has been disabled",
    rf"error decoding {WHERE}: unknown unsigned integer subtype 0x1[c-e]",
)
TOLD = re.compile(rf"The value cannot be decoded: ({'|'.join(FAULTS)})\. Message\.raw still holds its bytes\.")


class RuleBroken(Exception):
    """What the reader did that it must not do."""


def check(codec: Any, raw: bytes) -> None:
    """Raise `RuleBroken` unless the reader keeps its rules on these bytes; any other exception breaks one too."""
    value, refusal = read(codec, raw, MAX_BYTES)
    if refusal:
        return
    items, has_nan = count(value)
    # What was read twice, a repeated key, would not be counted in the value. The digits of a decimal may stand as a
    # bignum although 64 bits hold them, which the value does not tell.
    limits = range(items, items + raw.count(b"\xc4") + 1)
    least = next((limit for limit in limits if not read(codec, raw, limit)[1]), None)
    if least is None or "items" not in read(codec, raw, least - 1)[1]:
        raise RuleBroken(f"the limit counts something else than the {items} items of the value")
    codec.MAX_ITEMS = least
    try:
        again = codec.encode(value)
    except EncodeError:
        if has_nan:
            return
        raise
    if read(codec, again, least) != (value, ""):
        raise RuleBroken("sent on, it comes back as something else")


def read(codec: Any, raw: bytes, max_items: int) -> tuple[object, str]:
    """Return the value and no refusal, or None and what the refusal says; `max_items` stands for the real limit."""
    codec.MAX_ITEMS = max_items
    try:
        return codec.decode(raw), ""
    except DecodeError as error:
        told = TOLD.fullmatch(str(error))
        if told is None:
            raise RuleBroken("the error says what no error may say") from error
        return None, told[1]


def count(value: object) -> tuple[int, bool]:
    """Return how many items a value has, and whether one is NaN."""
    match value:
        case list() | dict():
            inner = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
            keys = len(value) if isinstance(value, dict) else 0
            return 1 + keys + sum(items for items, _ in inner), any(has_nan for _, has_nan in inner)
        case Decimal():
            digits = int(value.scaleb(-int(value.as_tuple().exponent), Context(prec=2_000)))
            return 4 + (not -(2**64) <= digits < 2**64), False
        case date() | UUID():  # datetime is a date
            return 2, False
        case _:
            return 1, isinstance(value, float) and math.isnan(value)


# --- what is tried --------------------------------------------------------------------------------------------------


def head(major: int, argument: int, chance: Random) -> bytes:
    """Return the head of an item, as short as it can be or longer."""
    widths = [width for width in range(4) if argument < 1 << (8 << width)]
    if argument < 24 and chance.random() < 0.9:
        return bytes([major << 5 | argument])
    width = widths[0] if chance.random() < 0.8 else chance.choice(widths)
    return bytes([major << 5 | 24 + width]) + argument.to_bytes(1 << width)


def item(chance: Random, depth: int = 0) -> bytes:
    """Return an item as the reader likes it, or nearly so."""
    number = chance.choice(
        (0, 1, 23, 24, 255, 1_000, 2**32, 2**63, 2**64 - 1, chance.getrandbits(chance.randint(1, 64)))
    )
    match chance.choice("nnstblmlmgaxv" if depth < 5 else "nstb"):
        case "n":
            return head(chance.randrange(2), number, chance)
        case "s":
            return bytes([0xE0 | chance.randrange(32)]) + chance.randbytes(chance.choice((0, 0, 1, 2, 4, 8)))
        case "t":
            text = chance.choice(("", "a", "key", "é" * 9, "2026-08-02T12:00:00Z", "2026-08-02", "x" * 300)).encode()
            return head(3, len(text), chance) + text
        case "b":
            size = chance.choice((0, 1, 15, 16, 17, 300))
            return head(2, size, chance) + chance.randbytes(size)
        case "l":
            items = [item(chance, depth + 1) for _ in range(chance.randrange(5))]
            return head(4, len(items), chance) + b"".join(items)
        case "m":
            items = [item(chance, depth + 1) for _ in range(2 * chance.randrange(4))]
            return head(5, len(items) // 2, chance) + b"".join(items)
        case "g":
            return head(6, number, chance) + item(chance, depth + 1)
        case "a":
            return head(6, chance.choice((0, 1, 2, 4, 28, 29, 37, 1004)), chance) + item(chance, depth + 1)
        case "x":
            return head(4, 1, chance) * chance.randint(1, 40) + item(chance, depth + 1)
        case _:
            tagged = (b"\xc4\x82", b"\xd8\x25\x50" + chance.randbytes(16), b"\xd9\x03\xec\x6a2026-08-02", b"\xc1")
            return chance.choice(tagged) + head(chance.randrange(2), number, chance)


def mutating(mutate: Callable[[bytes, int], bytes]) -> Callable[[bytes, int, int], bytes]:
    """Return atheris' mutator with our own items, since it sees nothing of what goes on in the decoder's own code."""

    def mutated(raw: bytes, max_size: int, seed: int) -> bytes:
        chance = Random(seed)
        match chance.randrange(4):
            case 0:
                return item(chance)[:max_size]
            case 1:
                at = chance.randrange(len(raw) + 1)
                return (raw[:at] + item(chance) + raw[at + chance.randrange(4) :])[:max_size]
            case _:
                return mutate(raw, max_size)

    return mutated


@click.command()
@click.option("--runs", default=1_000_000, show_default=True, help="How many inputs to try.")
@click.option("--seed", default=0, help="Of an earlier run, to repeat it; 0 draws one.")
@click.argument("inputs", nargs=-1, type=click.Path(exists=True, dir_okay=False))
def main(runs: int, seed: int, inputs: tuple[str, ...]) -> None:
    """Try hostile bytes on the CBOR reader, or the INPUTS that an earlier run kept."""
    try:
        atheris: Any = import_module("atheris")
    except ImportError:
        raise click.ClickException(
            "atheris is not installed. Install it: .venv/bin/pip install --editable '.[fuzz]' "
            "(there are builds for CPython 3.11 to 3.13 on Linux, x86-64)."
        ) from None
    codec: Any = import_module("mailroom.values.codec")
    readers = ("decode", "read_item", "_has_too_many_items", "_check_decoded", "_decimal", "_exactly", "_decode_fault")
    for function in readers:
        setattr(codec, function, atheris.instrument_func(getattr(codec, function)))
    with tempfile.TemporaryDirectory(prefix="mailroom-fuzz-") as corpus:
        for nth, raw in enumerate([*golden().values(), *(raw for raw, _ in WRONG.values())]):
            Path(corpus, str(nth)).write_bytes(raw[:MAX_BYTES])
        flags = [f"-atheris_runs={runs}", f"-max_len={MAX_BYTES}", "-timeout=1", "-rss_limit_mb=512"]
        flags += [f"-seed={seed}"] if seed else []
        atheris.Setup(
            [sys.argv[0], *flags, *(inputs or [corpus])],
            lambda raw: check(codec, raw),
            custom_mutator=lambda raw, max_size, chance: mutating(atheris.Mutate)(raw, max_size, chance),
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
