"""Patterns of topics, and which one of those that fit is the most specific."""

import re
from collections.abc import Iterator
from typing import Generic, TypeVar

from mailroom.errors import ConfigurationError
from mailroom.names import MAX_TOPIC_LENGTH, TOPIC, shown

T = TypeVar("T")

ONE, MANY = "*", "#"
WORD = re.compile(r"[A-Za-z0-9_-]*\Z")


class Patterns(Generic[T]):
    """What is registered for topics and patterns. Dots part words: `*` is one word, a last `#` any number, or none."""

    def __init__(self) -> None:
        self._exact: dict[str, T] = {}
        self._patterns: dict[tuple[str, ...], T] = {}  # the most specific first

    def add(self, pattern: str, item: T) -> None:
        """Register `item`. Raises `ConfigurationError` if it is no pattern, or registered already."""
        words = pattern_words(pattern)
        if ONE in words or MANY in words:
            known, added = words in self._patterns, self._patterns | {words: item}
            self._patterns = dict(sorted(added.items(), key=lambda each: _rank(each[0])))
        else:
            known = pattern in self._exact
            self._exact[pattern] = item
        if known:
            raise ConfigurationError(f"There is a handler for {pattern} already: register one only.")

    def find(self, topic: str) -> T | None:
        """Return what is registered for the most specific pattern that fits, compared word by word: word, `*`, `#`."""
        if (exact := self._exact.get(topic)) is not None or not self._patterns:
            return exact
        words = topic.split(".")
        return next((item for pattern, item in self._patterns.items() if _fits(pattern, words)), None)

    def __iter__(self) -> Iterator[str]:
        yield from self._exact
        yield from (".".join(words) for words in self._patterns)


def pattern_words(pattern: object) -> tuple[str, ...]:
    """Return the words of a topic or a pattern. Raises `ConfigurationError` if it is neither."""
    if isinstance(pattern, str) and TOPIC.match(pattern):
        return tuple(str.__str__(pattern).split("."))
    words = tuple(str.__str__(pattern).split(".")) if isinstance(pattern, str) else ()
    before = words[:-1] if words[-1:] == (MANY,) else words
    if (
        not words
        or len(str(pattern)) > MAX_TOPIC_LENGTH
        or not all(word == ONE or WORD.match(word) for word in before)
        or (before != words and ONE in before)
        or not (words[0] in (ONE, MANY) or words[0][:1].isalpha())
    ):
        raise ConfigurationError(
            f"{shown(pattern)} is neither a topic nor a pattern: dots part words, * is one word, and a last word "
            "# any number of them, in a pattern without *."
        )
    return words


def _rank(words: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(1 if word == ONE else 2 if word == MANY else 0 for word in words)


def _fits(pattern: tuple[str, ...], words: list[str]) -> bool:
    if pattern[-1] == MANY:
        pattern = pattern[:-1]
        if len(words) < len(pattern):
            return False
    elif len(words) != len(pattern):
        return False
    return all(wanted in (ONE, word) for wanted, word in zip(pattern, words, strict=False))
