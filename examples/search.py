"""A full-text index kept by executables: a document is saved at once, its many index entries soon after.

Saving a document of a thousand words would put a thousand entries, and count up a thousand busy counters of how many
documents have a word, in the transaction that saves it. Here that transaction writes the document and one COPY of
executables; writers never wait for each other over a word that both use.

An entry is the key `word/<word>/<document>` of the store, with how often the word occurs as its value; the counter
`documents/<word>` says how many documents have it.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from outbox import Executable, Store

STORE = Store()
WORD = re.compile(r"\w{2,40}")

DOCUMENTS = "CREATE TABLE IF NOT EXISTS document (id bigint PRIMARY KEY, body text NOT NULL)"


class Hit(NamedTuple):
    """A document that was found, and how well it fits."""

    document: int
    score: float


def save(connection: psycopg.Connection[Any], document: int, body: str) -> None:
    """Save a document, new or changed, in the caller's transaction; the index follows."""
    before = _body(connection, document)
    connection.execute(
        "INSERT INTO document VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET body = excluded.body", [document, body]
    )
    STORE.send_many(connection, _changes(document, words(before), words(body)))


def remove(connection: psycopg.Connection[Any], document: int) -> None:
    """Remove a document in the caller's transaction."""
    before = _body(connection, document)
    connection.execute("DELETE FROM document WHERE id = %s", [document])
    STORE.send_many(connection, _changes(document, words(before), Counter()))


def words(body: str) -> Counter[str]:
    """Return how often each word occurs."""
    return Counter(word.lower() for word in WORD.findall(body))


def _body(connection: psycopg.Connection[Any], document: int) -> str:
    # Locked: of two who save one document at once, the second sees what the first has written.
    row = connection.execute("SELECT body FROM document WHERE id = %s FOR UPDATE", [document]).fetchone()
    return str(row[0]) if row else ""


def _changes(document: int, before: Counter[str], after: Counter[str]) -> Iterator[Executable]:
    for word in before.keys() - after.keys():
        yield Executable("delete", f"word/{word}/{document}")
        yield Executable("increment", f"documents/{word}", amount=-1)
    for word, times in after.items():
        if before[word] != times:
            yield Executable("put", f"word/{word}/{document}", value=str(times).encode())
        if word not in before:
            yield Executable("increment", f"documents/{word}", amount=1)


ENTRIES = """
SELECT split_part(key, '/', 3)::bigint, convert_from(value, 'UTF8')::int FROM mailroom.store
WHERE key >= 'word/' || %(word)s || '/' AND key < 'word/' || %(word)s || '0'
"""  # the character behind / is 0


def search(connection: psycopg.Connection[Any], query: str, limit: int = 10) -> list[Hit]:
    """Return the documents that have the most, and the rarest, of the words (tf-idf, Spärck Jones 1972)."""
    row = connection.execute("SELECT count(*) FROM document").fetchone()
    documents = row[0] if row else 0
    scores: Counter[int] = Counter()
    for word in words(query):
        having = STORE.get(connection, f"documents/{word}")
        if not isinstance(having, int) or having < 1:
            continue
        rarity = math.log(1 + documents / having)
        for document, times in connection.execute(ENTRIES, {"word": word}):
            scores[document] += times * rarity
    best = sorted(scores.items(), key=lambda each: (-each[1], each[0]))
    return [Hit(document, score) for document, score in best[:limit]]
