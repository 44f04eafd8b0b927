"""The example programs of executables do what they say."""

import subprocess
import sys
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from examples import accounts, search
from examples.coordinator import __main__ as coordinator
from mailroom.testing import execute
from tests.support.databases import Connect
from tests.support.waiting import WITHIN_S


def test_balances_are_what_the_transfers_come_to(dsn: str, connect: Connect) -> None:
    assert accounts.main(dsn, clients=4, each=20) == []
    connection = connect()
    [(transfers, balances)] = connection.execute(
        "SELECT (SELECT count(*) FROM transfer), (SELECT sum(number) FROM mailroom.store WHERE key ^@ 'balance/')"
    ).fetchall()
    assert (transfers, balances) == (80, 0)
    assert accounts.STORE.books(connection, "transfers").count == 80
    connection.execute("UPDATE mailroom.store SET number = number + 1 WHERE key = 'balance/de/north/ada'")
    [(account, wanted, found)] = accounts.differences(connection)
    assert (account, found) == ("balance/de/north/ada", wanted + 1 if wanted is not None else None)


def test_transfers_do_not_wait_for_each_other(connect: Connect) -> None:
    first, second = connect(), connect()
    first.execute(accounts.TRANSFERS)
    first.commit()
    second.execute(f"SET lock_timeout = '{WITHIN_S:.0f}s'")
    accounts.transfer(first, "de/north/ada", "fr/west/bob", 100)
    accounts.transfer(second, "fr/west/bob", "de/north/ada", 30)
    second.commit()
    first.commit()
    execute(first)
    assert accounts.STORE.get(first, "balance/de/north/ada") == -70


@pytest.mark.slow
def test_program_of_the_accounts_runs(dsn: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "examples.accounts", dsn], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines()[0] == "400 transfers among 9 accounts"
    assert ran.stdout.splitlines()[-1] == "Every balance is what the transfers come to."


def test_programs_tell_a_wrong_connection_string(capsys: pytest.CaptureFixture[str]) -> None:
    for program in (accounts, coordinator):
        assert program._run(["nonsense"]) == 2
        assert "The connection string cannot be read" in capsys.readouterr().err


def test_documents_are_found_by_the_rarest_of_their_words(connect: Connect) -> None:
    connection = connect()
    connection.execute(search.DOCUMENTS)
    search.save(connection, 1, "The outbox and the inbox")
    search.save(connection, 2, "The dispatcher delivers the outbox")
    search.save(connection, 3, "The executor executes")
    assert search.search(connection, "outbox") == []  # not yet
    execute(connection)
    assert [hit.document for hit in search.search(connection, "OUTBOX")] == [1, 2]
    assert search.search(connection, "the dispatcher")[0].document == 2
    search.save(connection, 2, "It delivers")
    search.remove(connection, 1)
    execute(connection)
    assert search.search(connection, "outbox dispatcher") == []
    assert [hit.document for hit in search.search(connection, "delivers")] == [2]


def test_index_is_that_of_the_documents_after_any_changes(connect: Connect) -> None:
    connection = connect()
    connection.execute(search.DOCUMENTS)
    choose = Random(5)
    vocabulary = [f"w{number}" for number in range(12)]
    for _ in range(60):
        document = choose.randint(1, 6)
        if choose.random() < 0.2:
            search.remove(connection, document)
        else:
            search.save(connection, document, " ".join(choose.choices(vocabulary, k=8)))
        if choose.random() < 0.3:
            execute(connection)
    execute(connection)
    wanted = {
        f"word/{word}/{document}": str(times).encode()
        for document, body in connection.execute("SELECT id, body FROM document")
        for word, times in search.words(body).items()
    }
    having = Counter(key.split("/")[1] for key in wanted)
    rows = connection.execute("SELECT key, value, number FROM mailroom.store").fetchall()
    assert {key: value for key, value, _ in rows if value is not None} == wanted
    assert {key: number for key, _, number in rows if number} == {f"documents/{word}": n for word, n in having.items()}
    hits = search.search(connection, "w1 w2 w3")
    assert all(first.score >= second.score for first, second in pairwise(hits))
