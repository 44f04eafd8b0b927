"""A real PgBouncer in transaction mode before the test's server."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from mailroom.embedded.account import server_account
from tests.support.port import free_port
from tests.support.waiting import eventually

SERVER_CONNECTIONS = 2


@contextlib.contextmanager
def pgbouncer(dsn: str, home: Path, *, ignore: str = "", pool_size: int = SERVER_CONNECTIONS) -> Iterator[str]:
    """Run one with `pool_size` connections to the server of `dsn` and give the URL that leads through it.

    `home` is a directory that the server's account can enter. `ignore` names start-up parameters that it takes and
    drops; any other one it refuses. Skips the test where the program is not installed.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("PgBouncer is not installed: apt-get install pgbouncer, or make pgbouncer")
    target = conninfo_to_dict(dsn)
    login = " ".join(f"{name}={target[name]}" for name in ("host", "port", "user", "password") if target.get(name))
    port = free_port()
    account = server_account()
    settings = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": pool_size,
        "ignore_startup_parameters": ignore,
        "logfile": "",
    }
    configuration = home / f"pgbouncer-{port}.ini"
    configuration.write_text(
        f"[databases]\n* = {login}\n[pgbouncer]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    configuration.chmod(0o644)
    started = subprocess.Popen(
        [program, "-q", configuration],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        user=account.uid if account.switched else None,
        group=account.gid if account.switched else None,
        extra_groups=[] if account.switched else None,
    )
    url = f"postgresql://mailroom@127.0.0.1:{port}/{quote(str(target['dbname']))}"
    try:
        eventually(lambda: started.poll() is not None or _answers(url))
        assert started.poll() is None, f"PgBouncer ended with {started.returncode}"
        yield url
    finally:
        started.terminate()
        started.wait()


def _answers(url: str) -> bool:
    with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url, prepare_threshold=None) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)
    return False
