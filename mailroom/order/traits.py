"""What an order of inboxes lets one do with their messages: its traits, the one table that code and statements go by.

Nobody outside of the rooms of the orders asks which order an inbox has. How an order does what it does is in its class
(`inbox.order`): how it takes a message, and whether it deletes it then, concerns nobody else.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from mailroom.sql.operation import Operation, Sql

OrderName: TypeAlias = Literal["key", "total", "log"]


@dataclass(frozen=True, slots=True)
class Traits:
    """What an order is called, and what it lets one do.

    `parks_one`: a key fails, waits, is parked and is paused without others; else the inbox does as a whole.
    `in_parts`: readers may share out the messages and read side by side. `takes_replays`: one inbox may get a message
    that no other has. `drops`: messages may be dropped after a time. `is_bounded`: messages are given out up to a
    bound, so that all nodes give out the same (`mailroom.order.total`). `reads_log`: its messages stand in a log, which
    others read too.
    """

    name: OrderName
    parks_one: bool
    in_parts: bool
    takes_replays: bool
    drops: bool
    is_bounded: bool
    reads_log: bool


BY_KEY = Traits("key", parks_one=True, in_parts=True, takes_replays=True, drops=True, is_bounded=False, reads_log=False)
IN_TOTAL = Traits(
    "total", parks_one=False, in_parts=False, takes_replays=False, drops=False, is_bounded=True, reads_log=False
)
OF_LOG = Traits(
    "log", parks_one=True, in_parts=False, takes_replays=True, drops=False, is_bounded=False, reads_log=True
)
TRAITS: dict[str, Traits] = {each.name: each for each in (BY_KEY, IN_TOTAL, OF_LOG)}

ORDER = Sql("""SELECT "order" FROM {schema}.inbox_registry WHERE name = '{inbox}'""", columns=("text",))


def reading_traits(schema: str, inbox: str) -> Operation[Traits]:
    """Return the traits of an inbox's order."""
    found = yield ORDER.at(schema=schema, inbox=inbox)()
    return traits_of(found[0][0] if found else None)


def traits_of(order: str | None) -> Traits:
    """Return the traits of an order; None is what an inbox has if nobody has chosen one."""
    return BY_KEY if order is None else TRAITS[order]


def chosen(of: str = "", **traits: bool) -> str:
    """Return the condition, as SQL, that the order of an inbox has these traits or lacks them.

    `of` is the alias of `inbox_registry`. An equality where one order does, since the index on bounded inboxes has one
    (`registry_total`).
    """
    names = [
        f"'{name}'"
        for name, each in TRAITS.items()
        if all(getattr(each, trait) is has for trait, has in traits.items())
    ]
    column = f'{of}."order"' if of else '"order"'
    return f"{column} = {names[0]}" if len(names) == 1 else f"{column} IN ({', '.join(names)})"
