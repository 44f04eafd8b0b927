"""Logins, TLS and rights of bridges to NATS, on servers that ask for them."""

import asyncio
import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import nats as nats_client
import pytest

from dispatcher.bridges.nats.client import quoted
from dispatcher.bridges.nats.options import client_options
from dispatcher.bridges.nats.publisher import NatsPublisher
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.publisher import BrokerRefused, RecordRefused
from mailroom.bridges.record import Form
from mailroom.bridges.settings import OutSettings
from mailroom.errors import ConfigurationError
from outbox import Outbox, Outgoing
from tests.bridges.nats_records import a_bridge, quicken, record
from tests.bridges.tended import beside, out_state, set_bridge, tended
from tests.support.certificates import Authority
from tests.support.nats import Nats, nats_program
from tests.support.node import Node
from tests.support.waiting import eventually_async

HOST = "nats.test"
OPEN = {"user": "me", "password": "right"}


@pytest.fixture(scope="module")
def home(shared_home: Path) -> Path:
    """A directory of this module's own; without a server the test is skipped."""
    if nats_program() is None:
        pytest.skip("NATS is not installed: apt-get install nats-server, or make brokers")
    directory = shared_home / f"nats-logins-{os.getpid()}"
    directory.mkdir()
    return directory


@dataclass
class Secure:
    """A server that asks for TLS, for a certificate of its client and for a password."""

    nats: Nats
    tls: dict[str, str]  # the options of a client that it takes
    other_ca: str


@pytest.fixture(scope="module")
def secure(home: Path) -> Iterator[Secure]:
    """A server with TLS, and a stream. The user "narrow" may not publish to all of its subjects."""
    authority = Authority(home / "authority", "authority")
    (cert, key), (own_cert, own_key) = authority.certificate(HOST), authority.certificate("client.test")
    tls = {"tls_ca": str(authority.ca), "tls_hostname": HOST, "tls_cert": str(own_cert), "tls_key": str(own_key)}
    settings = f"""
        tls: {{cert_file: "{cert}", key_file: "{key}", ca_file: "{authority.ca}", verify: true}}
        authorization: {{users: [
            {{user: me, password: right}},
            {{user: narrow, password: right, permissions: {{publish: {{deny: ["rights.order.secret", "rights.a"]}}}}}},
            {{user: mute, password: right, permissions: {{publish: {{deny: "$JS.API.STREAM.INFO.>"}}}}}}]}}
    """
    with Nats(home / "secure", settings) as nats:
        asyncio.run(add_stream(nats, "rights", OPEN | tls))
        yield Secure(nats, tls, str(Authority(home / "other", "other").ca))


async def add_stream(nats: Nats, stream: str, options: Mapping[str, str]) -> None:
    """Make a stream, whose subjects begin with its name, with a login of a bridge."""
    arguments: dict[str, Any] = client_options("test", options)
    client = await nats_client.connect(nats.url, **arguments)
    try:
        await client.jetstream().add_stream(name=stream, subjects=[f"{stream}.>"])
    finally:
        await client.close()


async def opened(nats: Nats, stream: str, options: Mapping[str, str], *, scheme: str = "nats") -> int:
    """Open a publisher to the stream with these options, and close it; return what it says."""
    publisher = NatsPublisher(a_bridge(nats.url.replace("nats", scheme, 1), stream, options))
    try:
        return await asyncio.wait_for(publisher.open(), 60)
    finally:
        await publisher.close()


async def test_server_and_client_show_each_other_their_certificates(secure: Secure) -> None:
    nats, tls = secure.nats, secure.tls
    assert await opened(nats, "rights", OPEN | tls) == 0
    assert await opened(nats, "rights", OPEN | tls, scheme="tls") == 0
    unlike = "the certificate of the server is not accepted: "
    with pytest.raises(BrokerRefused, match=rf"^{unlike}IP address mismatch.* the name that stands in it \(TLS_HOST"):
        await opened(nats, "rights", OPEN | {name: path for name, path in tls.items() if name != "tls_hostname"})
    with pytest.raises(BrokerRefused, match=rf"^{unlike}Hostname mismatch"):
        await opened(nats, "rights", OPEN | tls | {"tls_hostname": "other.test"})
    with pytest.raises(BrokerRefused, match=rf"^{unlike}unable to get local issuer.* signed it \(TLS_CA\)"):
        await opened(nats, "rights", OPEN | tls | {"tls_ca": secure.other_ca})
    with pytest.raises(BrokerRefused, match=rf"^{unlike}unable to get local issuer"):
        await opened(nats, "rights", OPEN)
    with pytest.raises(BrokerRefused, match=r"^the server does not accept the client's certificate: .*\(TLS_CERT"):
        await opened(nats, "rights", OPEN | {"tls_ca": tls["tls_ca"], "tls_hostname": HOST})
    for missing in ("tls_ca", "tls_cert"):
        with pytest.raises(ConfigurationError, match=r"files of TLS \(tls_ca, tls_cert, tls_key\) cannot be used"):
            await opened(nats, "rights", OPEN | tls | {missing: "/nowhere/file.pem"})


async def test_token_is_taken_and_is_not_sent_to_a_server_without_tls_if_the_bridge_wants_tls(
    home: Path, secure: Secure
) -> None:
    with Nats(home / "token", "authorization: {token: right}") as nats:
        await add_stream(nats, "token", {"token": "right"})
        assert await opened(nats, "token", {"token": "right"}) == 0
        with pytest.raises(BrokerRefused, match="refuses this client: Authorization Violation"):
            await opened(nats, "token", {"token": "wrong"})
        for options, scheme in (({"token": "right"}, "tls"), ({"token": "right"} | secure.tls, "nats")):
            with pytest.raises(
                BrokerRefused, match=r"does not ask for TLS, which the bridge wants.* No login was sent"
            ):
                await opened(nats, "token", options, scheme=scheme)


# -- Keys -------------------------------------------------------------------------------------------------------------


def seed_file(path: Path, kind: int, of: int) -> tuple[Any, str]:
    """Write the seed of a key pair to a file; return the pair, and its public key."""
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(bytes([of]) * 32, kind)
    path.write_bytes(seed + b"\n")
    pair = nkeys.from_seed(bytearray(seed))
    return pair, pair.public_key.decode()


def signed(pair: Any, claims: dict[str, object]) -> str:
    """Return a JWT as NATS has them."""
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, claims]
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{text}.{base64.urlsafe_b64encode(pair.sign(text.encode())).decode().rstrip('=')}"


async def test_nkey_and_credentials_are_taken(home: Path) -> None:
    nkeys = pytest.importorskip("nkeys")
    seed = home / "user.nk"
    _, user = seed_file(seed, nkeys.PREFIX_BYTE_USER, 1)
    by_key = {"nkey_seed_file": str(seed)}
    with Nats(home / "nkey", f"authorization: {{users: [{{nkey: {user}}}]}}") as nats:
        await add_stream(nats, "nkey", by_key)
        assert await opened(nats, "nkey", by_key) == 0
        seed_file(home / "other.nk", nkeys.PREFIX_BYTE_USER, 2)
        with pytest.raises(BrokerRefused, match="refuses this client: Authorization Violation"):
            await opened(nats, "nkey", {"nkey_seed_file": str(home / "other.nk")})

    operator, operator_key = seed_file(home / "operator.nk", nkeys.PREFIX_BYTE_OPERATOR, 3)
    account, account_key = seed_file(home / "account.nk", nkeys.PREFIX_BYTE_ACCOUNT, 4)
    _, system_key = seed_file(home / "system.nk", nkeys.PREFIX_BYTE_ACCOUNT, 5)
    issued = {"jti": "1", "iat": 1, "iss": operator_key}
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
    streams = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    system = {"limits": limits, "type": "account", "version": 2}
    of_account = system | {"limits": limits | streams}
    settings = f"""
        operator: {signed(operator, issued | {"sub": operator_key, "nats": {"type": "operator", "version": 2}})}
        system_account: {system_key}
        resolver: MEMORY
        resolver_preload: {{
            {account_key}: {signed(operator, issued | {"sub": account_key, "nats": of_account})}
            {system_key}: {signed(operator, issued | {"sub": system_key, "nats": system})}
        }}
    """
    of_user = {"pub": {}, "sub": {}, "subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2}
    token = signed(account, issued | {"iss": account_key, "sub": user, "nats": of_user})
    credentials = home / "user.creds"
    credentials.write_text(
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed.read_text()}------END USER NKEY SEED------\n"
    )
    by_file = {"credentials": str(credentials)}
    with Nats(home / "credentials", settings) as nats:
        await add_stream(nats, "creds", by_file)
        assert await opened(nats, "creds", by_file) == 0
        with pytest.raises(BrokerRefused, match="refuses this client: Authorization Violation"):
            await opened(nats, "creds", {})


@pytest.mark.parametrize("option", ["credentials", "nkey_seed_file"])
def test_file_of_a_key_that_cannot_be_used_is_told(tmp_path: Path, option: str) -> None:
    pytest.importorskip("nkeys")
    path = tmp_path / "file"
    with pytest.raises(ConfigurationError, match=f"the file of {option} cannot be read: FileNotFoundError"):
        client_options("x", {option: str(path)})
    for text in ("", "SUAM-hunter2\n", "-----BEGIN NATS USER JWT-----\n", "-----BEGIN USER NKEY SEED-----\nSUAM\n"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match=f"the file of {option} holds no seed of an nkey") as told:
            client_options("x", {option: str(path)})
        assert "hunter2" not in str(told.value)


def test_keys_without_their_package_say_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_text("SUAM\n")
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(
        ConfigurationError, match=r"needs the package nkeys .*pip install 'pg-mailroom\[nats\]'"
    ) as told:
        client_options("x", {"nkey_seed_file": str(path)})
    assert told.value.code == "MR-bridge-no-client"


# -- Rights -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_right_that_is_denied_for_a_subject_concerns_its_records_only(
    node: Node, secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    quicken(monkeypatch)
    for option, value in (secure.tls | {"user": "narrow", "password": "right"}).items():
        monkeypatch.setenv(f"MAILROOM_BRIDGE_OUT_{option.upper()}", value)
    settings = OutSettings("nats", secure.nats.url, Form("rights.{topic}"))
    await beside(node, lambda it: Bridges().out(it, "out", settings, topics="order.#", actor="test"))
    topics = ["paid", "secret", "paid", "secret", "secret", "paid"]
    with node.connection.transaction():
        Outbox().send_many(node.connection, [Outgoing(f"order.{topic}", n) for n, topic in enumerate(topics)])
    node.deliver_all()
    async with tended(node) as lane:
        await eventually_async(lambda: out_state(node).state == "stopped")
        why = out_state(node).why or ""
        assert "row 2 cannot be published: the server denies this client the right to publish to rights.order." in why
        assert "--on-failure skip" in why
        assert out_state(node).acked == 1
        set_bridge(node, "out", on_failure="skip")
        await lane.follow_until(lambda: out_state(node).acked == 6)
        await eventually_async(lambda: out_state(node).state == "open")
    assert [stage for _, stage, _ in node.dead()] == ["publish"] * 3
    assert all("the right to publish to rights.order.secret" in reason for _, _, reason in node.dead())
    assert await values(secure, "rights.order.paid") == [b"0", b"2", b"5"]


async def values(secure: Secure, subject: str) -> list[bytes | None]:
    """Return what is in the stream, in order, of one subject."""
    arguments: dict[str, Any] = client_options("test", OPEN | secure.tls)
    client = await nats_client.connect(secure.nats.url, **arguments)
    try:
        js = client.jetstream()
        last = (await js.stream_info("rights")).state.last_seq
        records = [await js.get_msg("rights", sequence) for sequence in range(1, last + 1)]
        return [each.data for each in records if each.subject == subject]
    finally:
        await client.close()


async def test_denial_of_one_record_is_not_taken_for_one_of_the_next(
    secure: Secure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client makes all that the server says lower case, so "rights.A" is told apart from "rights.a" by time.

    The records are large: when the first denial comes, the server has not read the last of them.
    """
    monkeypatch.setattr("dispatcher.bridges.nats.publisher.POLL_S", 0.001)
    bridge = a_bridge(secure.nats.url, "rights", secure.tls | {"user": "narrow", "password": "right"})
    publisher = NatsPublisher(bridge)
    await publisher.open()
    try:
        large = [replace(record(n, "rights.a", bridge), value=b"x" * 500_000) for n in range(1, 41)]
        with pytest.raises(RecordRefused, match=r"the right to publish to rights\.a\."):
            await publisher.publish(large)
        await publisher.publish([record(41, "rights.A", bridge)])
        assert publisher.trouble is None
    finally:
        await publisher.close()
    assert await values(secure, "rights.A") == [b"41"]


async def test_right_that_the_bridge_itself_lacks_stops_it(secure: Secure) -> None:
    with pytest.raises(BrokerRefused, match=r"refuses this client: permissions violation for publish to .\$js\.api"):
        await opened(secure.nats, "rights", secure.tls | {"user": "mute", "password": "right"})


def test_subject_is_known_again_in_what_the_server_says() -> None:
    assert quoted('Shop."a"\\b') == 'shop.\\"a\\"\\\\b'
