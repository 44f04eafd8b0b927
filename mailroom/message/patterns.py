"""Patterns of topics, and which one of those that fit is the most specific."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from mailroom.errors import ConfigurationError
from mailroom.message.topic import Topic, pattern_text
from mailroom.values.names import MANY, ONE, fits

T = TypeVar("T")


class Patterns(Generic[T]):
    """What is registered for topics and patterns. Dots part words: `*` is one word, a last `#` any number, or none."""

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._patterns: dict[tuple[str, ...], T] = {}  # the most specific first

    def add(self, topic: Topic[Any, Any] | str, item: T) -> None:
        """Register `item`. Raises `InvalidMessage` if that is not a pattern, `ConfigurationError` for a second item."""
        pattern = pattern_text(topic)
        if pattern in self:
            raise ConfigurationError(
                f"There is a handler for {pattern} already: register one only.", code="MR-registered-twice"
            )
        words = tuple(pattern.split("."))
        if ONE in words or MANY in words:
            added = self._patterns | {words: item}
            self._patterns = dict(sorted(added.items(), key=lambda each: _rank(each[0])))
        else:
            self._exact[pattern] = item

    def find(self, topic: str) -> T | None:
        """Return what is registered for the most specific pattern that fits, compared word by word: word, `*`, `#`."""
        if (exact := self._exact.get(topic)) is not None or not self._patterns:
            return exact
        words = topic.split(".")
        return next((item for pattern, item in self._patterns.items() if fits(pattern, words)), None)

    def __iter__(self) -> Iterator[str]:
        yield from self._exact
        yield from (".".join(words) for words in self._patterns)


def _rank(words: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(1 if word == ONE else 2 if word == MANY else 0 for word in words)
