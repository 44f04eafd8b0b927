"""The load of a campaign: topics, inboxes, logs and keys; one hot key, and some that no handler ever takes."""

import random
from dataclasses import dataclass
from uuid import UUID

# Two inboxes with workers (sync, async), one reaped by hand; a topic per inbox and an event that two of them get.
INBOXES = ("alpha", "beta", "gamma")
EVENT = "all.changed"
# Two logs: one has readers with workers (sync, async), the other, of few lanes, one that is read by hand. Both get the
# event, too.
LOGGED, NOTED = "logged", "noted"
LOGS = {"journal": (LOGGED, 8), "diary": (NOTED, 2)}
READERS = {"delta": "journal", "bravo": "journal", "epsilon": "diary"}
WORKED = ("alpha", "beta", LOGGED)  # topics whose handlers are workers'
TARGETS = (*INBOXES, LOGGED, NOTED)
REFUSED = "broken"  # a topic whose inbox has no partition: the database refuses each of its messages
ROUTES = (*((name, name) for name in INBOXES), (EVENT, "alpha"), (EVENT, "beta"), (REFUSED, "nowhere"))
LOG_ROUTES = tuple((topic, reader) for reader, log in READERS.items() for topic in (LOGS[log][0], EVENT))
KEYS = 1_000
HOT_SHARE = 0.3
POISON = "poison-"
RUDE = "rude-"  # the handler fails on these with errors that look like the database's
KILLING = "killing-"  # the worker dies of these
ENDING = "ending-"  # with these the handler ends the transaction of its batch
POISON_SHARE = 0.01
POISON_KEYS = 10
REFUSED_SHARE = 0.000_2
SCHEDULED_SHARE = 0.01
CANARY = "canary-4c1d7e"  # stands in every value: it must turn up in no log


@dataclass(frozen=True, slots=True)
class Letter:
    """One message to be sent."""

    id: UUID
    topic: str
    key: str
    delay_s: float | None

    @property
    def value(self) -> dict[str, str]:
        """What is sent; the reader checks that it belongs to the message."""
        return {"id": str(self.id), "secret": CANARY}


def letter(dice: random.Random) -> Letter:
    """Return a message of the mix."""
    topic = dice.choices((*TARGETS, EVENT, REFUSED), (25, 25, 25, 15, 10, 10, 100 * REFUSED_SHARE))[0]
    draw = dice.random()
    if draw < HOT_SHARE:
        key = "hot"
    elif draw < HOT_SHARE + POISON_SHARE and topic != "gamma":
        key = f"{POISON}{dice.randrange(POISON_KEYS)}"
    else:
        key = f"key-{dice.randrange(KEYS)}"
    delay_s = dice.uniform(0, 0.3) if dice.random() < SCHEDULED_SHARE else None
    return Letter(UUID(int=dice.getrandbits(128), version=4), topic, key, delay_s)
