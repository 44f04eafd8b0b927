"""The statements that give a role its rights and take them, made of the matrix."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from mailroom.roles.matrix import PURPOSES, Kind, Right

PRIVILEGE = re.compile(r"([A-Z]+)(?: \((.+)\))?\Z")
# In statements they stand in these orders.
WORDS = {"schema": "SCHEMA", "table": "TABLE", "sequence": "SEQUENCE", "function": "FUNCTION"}
ORDER = ("USAGE", "CREATE", "SELECT", "INSERT", "UPDATE", "DELETE", "EXECUTE")


class Thing(NamedTuple):
    """An object that privileges are on; a schema has the name of itself."""

    kind: Kind | str
    name: str


class Atom(NamedTuple):
    """One privilege on one object, or on one column of it."""

    thing: Thing
    privilege: str
    column: str | None = None


Atoms: TypeAlias = frozenset[Atom]


@dataclass(frozen=True, slots=True)
class GrantedInbox:
    """An inbox that rights are given for: whether it is given out up to a bound, and which log it reads, if any."""

    name: str
    is_bounded: bool = False
    log: str | None = None


def schema_atoms(schema: str, purpose: str, staging: str | None) -> Iterator[Atom]:
    """Return the privileges of a purpose on schemas. Staging tables stand in the node's schema, or in `staging`."""
    yield Atom(Thing("schema", schema), "USAGE")
    if PURPOSES[purpose].creates:
        yield Atom(Thing("schema", staging or schema), "USAGE")
        yield Atom(Thing("schema", staging or schema), "CREATE")


def fixed_atoms(purpose: str) -> Atoms:
    """Return what a purpose needs whatever its inboxes are, schemas left out."""
    return frozenset(atom for right in PURPOSES[purpose].rights if not right.of_inbox for atom in _of(right))


# D-roles-5: No default privileges for new inboxes.
def inbox_atoms(purpose: str, inbox: GrantedInbox) -> Atoms:
    """Return what a purpose needs for one inbox, beside what it always needs."""
    needed = [
        right for right in PURPOSES[purpose].rights
        if right.of_inbox and (inbox.is_bounded or not right.bounded) and (inbox.log or not right.of_readers)
    ]  # fmt: skip
    return frozenset(atom for right in needed for atom in _of(right, inbox.name, inbox.log or ""))


def _of(right: Right, inbox: str = "", log: str = "") -> Iterator[Atom]:
    thing = Thing(right.kind, right.of.format(inbox=inbox, log=log))
    for text in right.privileges:
        found = PRIVILEGE.match(text)
        if found is None:
            raise AssertionError(f"not a privilege: {text}")
        for column in (found[2] or "").split(", "):
            yield Atom(thing, found[1], column or None)


def covered(atom: Atom, held: Atoms) -> bool:
    """Return whether a privilege is among those that are held; one on a table counts for each of its columns."""
    return atom in held or atom._replace(column=None) in held


def grants(schema: str, role: str, atoms: Iterable[Atom]) -> list[str]:
    """Return the statements that give these privileges to a role; objects with the same privileges share one."""
    return _statements("GRANT {} TO {}", schema, role, atoms)


def revokes(schema: str, role: str, atoms: Iterable[Atom]) -> list[str]:
    """Return the statements that take these privileges from a role; objects with the same privileges share one."""
    return _statements("REVOKE {} FROM {}", schema, role, atoms)


def _statements(form: str, schema: str, role: str, atoms: Iterable[Atom]) -> list[str]:
    held = frozenset(atoms)
    things: dict[Thing, list[Atom]] = {}
    for atom in sorted(held, key=_place):
        # A privilege on the whole table says more than one on some columns of it.
        if atom.column is None or not covered(atom, held - {atom}):
            things.setdefault(atom.thing, []).append(atom)
    alike: dict[tuple[str, str], list[str]] = {}
    for thing, of in things.items():
        alike.setdefault((thing.kind, _listed(of)), []).append(_named(schema, thing))
    return [
        form.format(f"{privileges} ON {WORDS[kind]} {', '.join(names)}", quoted(role))
        for (kind, privileges), names in alike.items()
    ]


def _place(atom: Atom) -> tuple[object, ...]:
    kind = list(WORDS).index(atom.thing.kind)
    return kind, atom.thing.name, ORDER.index(atom.privilege), atom.column or ""


def _listed(atoms: Iterable[Atom]) -> str:
    columns: dict[str, list[str]] = {}
    for atom in atoms:
        columns.setdefault(atom.privilege, []).extend([] if atom.column is None else [quoted(atom.column)])
    return ", ".join(f"{name} ({', '.join(of)})" if of else name for name, of in columns.items())


def _named(schema: str, thing: Thing) -> str:
    return quoted(thing.name) if thing.kind == "schema" else f"{quoted(schema)}.{quoted(thing.name)}"


def quoted(name: str) -> str:
    """Return a name as SQL has it, whatever stands in it."""
    return '"' + name.replace('"', '""') + '"'
