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
    if on_known_batch not in ("compare", "pass"):
        raise ConfigurationError(f"onKnownBatch is {shown(on_known_batch)}: it is compare, or pass.")
    return on_known_batch == "compare"
