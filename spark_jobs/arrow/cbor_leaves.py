"""CBOR of whole columns of numbers, texts and times by numpy: no Python runs per row.

Each function takes what stands in a column, with anything where there is null, and returns a `pa.LargeBinaryArray`
with one encoded item per row; `validity` is the bitmap of the rows that count (None for all).
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from spark_jobs.arrow.byte_arrays import Bytes, data, of_rows

UNSIGNED, NEGATIVE, BYTES, TEXT, LIST, MAP = (major << 5 for major in range(6))

# How many bytes follow the first one of a head, by its class: the number in the first byte, or in 1, 2, 4 or 8 more.
_FOLLOWING = np.array([0, 1, 2, 4, 8], np.uint64)
_CLASSES_FROM = tuple(map(np.uint64, (24, 1 << 8, 1 << 16, 1 << 32)))

_DATE_HEAD = b"\xd9\x03\xec\x6a"  # tag 1004, text of 10
_SHORT_HEAD, _LONG_HEAD = b"\xc0\x74", b"\xc0\x78\x1b"  # tag 0, text of 20 or 27: without and with microseconds
DAY_US = 86_400_000_000
# Of the years 1 to 9999, in days since 1970: the first, and the first one after.
_FIRST_DAY, _DAY_AFTER = -719_162, 2_932_897


def heads(
    major: int | npt.NDArray[np.uint64],
    arguments: npt.NDArray[np.uint64],
    validity: pa.Buffer | None = None,
    prefix: bytes = b"",
) -> pa.LargeBinaryArray:
    """Encode the head of an item, or the whole of an integer: `major`, shifted, with its argument; `prefix` before."""
    kind = np.zeros(len(arguments), np.uint8)
    for start in _CLASSES_FROM:
        kind += arguments >= start
    following = _FOLLOWING[kind]
    widest = int(following.max(initial=0))
    begin = len(prefix) + 1
    rows = np.empty((len(arguments), begin + widest), np.uint8)
    rows[:, : begin - 1] = np.frombuffer(prefix, np.uint8)
    rows[:, begin - 1] = major | np.where(kind == 0, arguments, kind + np.uint64(23))
    if widest:
        # Moved up, so that the bytes that count are the first ones whatever their number.
        moved = arguments << (np.uint64(64) - np.uint64(8) * np.maximum(following, 1))
        rows[:, begin:] = moved.astype(">u8").view(np.uint8).reshape(-1, 8)[:, :widest]
    return of_rows(rows, begin + following.astype(np.int64), validity)


def head(major: int, argument: int) -> bytes:
    """Encode one head."""
    raw: bytes = heads(major, np.array([argument], np.uint64))[0].as_py()
    return raw


def integers(numbers: npt.NDArray[np.int64], validity: pa.Buffer | None) -> pa.LargeBinaryArray:
    """Encode integers."""
    negative = (numbers < 0).astype(np.uint64) << np.uint64(5)
    return heads(negative, (numbers ^ (numbers >> 63)).view(np.uint64), validity)


def floats(numbers: npt.NDArray[np.float64], validity: pa.Buffer | None) -> pa.LargeBinaryArray:
    """Encode numbers as the eight bytes of a double; infinities in two, as the codec does."""
    rows = np.empty((len(numbers), 9), np.uint8)
    rows[:, 0] = 0xFB
    rows[:, 1:] = numbers.astype(">f8").view(np.uint8).reshape(-1, 8)
    infinite = np.isinf(numbers)
    if not infinite.any():
        return of_rows(rows, validity=validity)
    rows[infinite, :2] = 0xF9, 0x7C
    rows[:, 1] |= (infinite & (numbers < 0)).astype(np.uint8) << 7
    rows[infinite, 2] = 0
    return of_rows(rows, np.where(infinite, 3, 9), validity)


def decimals(
    digits: npt.NDArray[np.uint64], negative: npt.NDArray[np.bool_], scale: int, validity: pa.Buffer | None
) -> pa.LargeBinaryArray:
    """Encode decimal fractions of `digits`, or of -1 - `digits` where `negative`."""
    return heads(negative.astype(np.uint64) << np.uint64(5), digits, validity, _before_digits(scale))


def long_decimals(
    high: npt.NDArray[np.uint64],
    low: npt.NDArray[np.uint64],
    negative: npt.NDArray[np.bool_],
    scale: int,
    validity: pa.Buffer | None,
) -> pa.LargeBinaryArray:
    """The same, of digits that take more than 64 bits: the lower ones `low`, the others `high`, which is not 0."""
    prefix = _before_digits(scale)
    begin = len(prefix) + 2
    in_high = 8 - _leading_zeros(high)
    rows = np.empty((len(high), begin + 16), np.uint8)
    rows[:, : begin - 2] = np.frombuffer(prefix, np.uint8)
    rows[:, begin - 2] = 0xC2 + negative
    rows[:, begin - 1] = BYTES + 8 + in_high
    # Moved up, so that the bytes that count are the first ones whatever their number.
    up = np.uint64(64) - np.uint64(8) * in_high
    moved = np.where(up == 0, high, high << up | low >> np.uint64(64) - np.maximum(up, 1)), low << up
    for nth, half in enumerate(moved):
        rows[:, begin + 8 * nth : begin + 8 * nth + 8] = half.astype(">u8").view(np.uint8).reshape(-1, 8)
    return of_rows(rows, begin + 8 + in_high.astype(np.int64), validity)


def _before_digits(scale: int) -> bytes:
    return b"\xc4\x82" + (head(NEGATIVE, scale - 1) if scale else head(UNSIGNED, 0))


def _leading_zeros(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """How many of their eight bytes are 0 before the first that is not."""
    zeros = np.zeros(len(numbers), np.uint64)
    for bytes_ in range(1, 8):
        zeros += numbers < np.uint64(1) << np.uint64(8 * bytes_)
    return zeros


def in_years(numbers: npt.NDArray[np.int64], day: int) -> bool:
    """Whether all times are of the years 1 to 9999, counted from 1970 in a unit that makes `day` of a day."""
    return not len(numbers) or bool(_FIRST_DAY * day <= numbers.min() and numbers.max() < _DAY_AFTER * day)


def dates(days: npt.NDArray[np.int64], validity: pa.Buffer | None) -> pa.LargeBinaryArray:
    """Encode dates of the years 1 to 9999, given in days since 1970."""
    text = _texts(pa.array(days, pa.int32()).view(pa.date32()), 10)
    rows = np.empty((len(days), 14), np.uint8)
    rows[:, :4], rows[:, 4:] = np.frombuffer(_DATE_HEAD, np.uint8), text
    return of_rows(rows, validity=validity)


def timestamps(microseconds: npt.NDArray[np.int64], validity: pa.Buffer | None) -> pa.LargeBinaryArray:
    """Encode instants of the years 1 to 9999, given in microseconds since 1970, as RFC 3339 text in UTC."""
    text = _texts(pa.array(microseconds).view(pa.timestamp("us")), 26)
    rows = np.empty((len(microseconds), 30), np.uint8)
    rows[:, :3], rows[:, 3:29], rows[:, 29] = np.frombuffer(_LONG_HEAD, np.uint8), text, ord("Z")
    rows[:, 13] = ord("T")
    # Rows without a fraction are written as the codec does: the same instant always gives the same bytes.
    whole = microseconds % 1_000_000 == 0
    rows[whole, 1] = _SHORT_HEAD[1]
    rows[whole, 2:21] = rows[whole, 3:22]
    rows[whole, 21] = ord("Z")
    return of_rows(rows, np.where(whole, 22, 30), validity)


def _texts(array: pa.Array, width: int) -> Bytes:
    """Return the texts of an array, which are all of one width."""
    return data(array.cast(pa.large_string()))[: len(array) * width].reshape(-1, width)
