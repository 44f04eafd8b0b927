"""Busy accounts: transfers that never wait for each other, though all of them touch the same few balances.

A transfer is a row of its own. What it does to the two balances, and to the books of a country, a bank and a customer,
is left to executables in the same transaction. `python -m examples.accounts` runs some on the database that
MAILROOM_DSN names and holds the balances against the transfers.
"""

import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

import dispatcher
import mailroom
from mailroom.cli.failures import tell
from mailroom.cli.output import say
from outbox import Store

STORE = Store()
ACCOUNTS = tuple(f"{bank}/{name}" for bank in ("de/north", "de/south", "fr/west") for name in ("ada", "bob", "eve"))

TRANSFERS = """
CREATE TABLE IF NOT EXISTS transfer (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    debtor   text NOT NULL,
    creditor text NOT NULL,
    cents    bigint NOT NULL CHECK (cents > 0)
)
"""


def transfer(connection: psycopg.Connection[Any], debtor: str, creditor: str, cents: int) -> None:
    """Move money in the caller's transaction, which locks nobody's balance."""
    connection.execute("INSERT INTO transfer (debtor, creditor, cents) VALUES (%s, %s, %s)", [debtor, creditor, cents])
    STORE.increment(connection, f"balance/{debtor}", -cents)
    STORE.increment(connection, f"balance/{creditor}", cents)
    STORE.account(connection, f"transfers/{debtor}")  # transfers, transfers/de, transfers/de/north, ...


DIFFERENCES = """
WITH moved (key, cents) AS (
    SELECT 'balance/' || debtor, -cents FROM transfer UNION ALL SELECT 'balance/' || creditor, cents FROM transfer),
wanted AS (SELECT key, sum(cents)::bigint AS number FROM moved GROUP BY key)
SELECT key, wanted.number, store.number FROM wanted
FULL JOIN (SELECT key, number FROM mailroom.store WHERE key ^@ 'balance/') AS store USING (key)
WHERE wanted.number IS DISTINCT FROM store.number ORDER BY key
"""


def differences(connection: psycopg.Connection[Any]) -> list[tuple[str, int | None, int | None]]:
    """Return the balances that are not what the transfers come to: the account, what it should have, what it has."""
    return connection.execute(DIFFERENCES).fetchall()


def _transfers(dsn: str, seed: int, number: int) -> None:
    choose = random.Random(seed)  # noqa: S311 - not for secrets
    with psycopg.connect(dsn) as connection:
        for _ in range(number):
            debtor, creditor = choose.sample(ACCOUNTS, 2)
            transfer(connection, debtor, creditor, choose.randint(1, 10_000))
            connection.commit()


def main(dsn: str, clients: int = 8, each: int = 50) -> list[tuple[str, int | None, int | None]]:
    """Run transfers of several clients at once, have them applied, and return the differences."""
    with psycopg.connect(dsn) as connection:
        connection.execute(TRANSFERS)
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda seed: _transfers(dsn, seed, each), range(clients)))
    dispatcher.execute_all(dsn)  # in production a daemon does: mailroom dispatcher run
    with psycopg.connect(dsn) as connection:
        books = STORE.books(connection, "transfers")
        say(f"{books.count:,} transfers among {len(ACCOUNTS)} accounts")
        for bank in ("de", "de/north", "de/south", "fr"):
            say(f"  {bank:<9} {STORE.books(connection, f'transfers/{bank}').count:,}")
        return differences(connection)


def _run(arguments: Sequence[str]) -> int:
    try:
        wrong = main(mailroom.dsn(arguments[0] if arguments else None))
    except Exception as error:
        return tell(error)
    say(f"WRONG: {wrong}" if wrong else "Every balance is what the transfers come to.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_run(sys.argv[1:]))
