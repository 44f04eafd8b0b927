"""The options of a data source."""

from collections.abc import Iterable, Mapping

from mailroom.errors import ConfigurationError
from mailroom.names import shown


def demand_known(options: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise `ConfigurationError` for an option that is none of `known`: a misspelt one would do nothing, silently."""
    names = tuple(known)
    lowered = {name.lower() for name in names}
    for name in options:
        if name.lower() not in lowered:
            raise ConfigurationError(f"There is no option {shown(name)}; there are {', '.join(names)}.")


def is_compared(on_known_batch: str) -> bool:
    """Tell whether a batch that the ledger has is compared with what it was, by the option's value."""
    return _is_first("onKnownBatch", on_known_batch, "compare", "pass")


def is_nan_null(on_nan: str) -> bool:
    """Tell whether NaN in a value is sent as null, by the option's value."""
    return not _is_first("onNaN", on_nan, "refuse", "null")


def _is_first(name: str, text: str, first: str, second: str) -> bool:
    if text not in (first, second):
        raise ConfigurationError(f"{name} is {shown(text)}: it is {first}, or {second}.")
    return text == first
