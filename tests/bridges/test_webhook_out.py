"""Webhooks out: each message is posted until it is taken, its key in order, and to no other receiver."""

import asyncio
import itertools
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any
from uuid import UUID, uuid4

import httpcore
import httpx
import psycopg
import pytest

from dispatcher.bridges.webhook import publisher as webhook_publisher
from dispatcher.bridges.webhook.addresses import is_public
from dispatcher.bridges.webhook.connecting import resolve
from dispatcher.bridges.webhook.publisher import AGAIN_AT_ONCE, AT_ONCE, WebhookPublisher
from dispatcher.bridges.webhook.request import headers_of, retry_after_s
from mailroom.bridges.bridges import Bridges
from mailroom.bridges.publisher import Answered, BrokerRefused, BrokerTrouble, OutBridge
from mailroom.bridges.record import Form, Record, record_of
from mailroom.bridges.settings import InSettings, OutSettings
from mailroom.errors import ConfigurationError, MailroomError
from outbox import WebhookApp
from outbox.webhooks.signature import SignatureRefused, verify
from tests.bridges.messages import SENDER, message
from tests.bridges.receiver import Posted, Receiver, Told, receiving
from tests.bridges.tended import beside, out_state, tended
from tests.bridges.webhooks import NOW, OTHER, SECRET, client_of
from tests.support.node import Node
from tests.support.waiting import WITHIN_S, eventually_async

ROWS = itertools.count(1)
INSIDE = {"secrets": SECRET, "private": "yes"}


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


@dataclass
class Clock:
    """A clock that a pause moves on; only who is let go on does."""

    at: float = NOW
    pauses: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.at

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.at += seconds
        await asyncio.sleep(0)


def bridge_to(address: str, **options: str) -> OutBridge:
    return OutBridge("hooks", 3, SENDER.node_id, "paris", OutSettings("webhook", address), options)


@asynccontextmanager
async def publishing(
    url: str,
    clock: Clock | None = None,
    options: dict[str, str] | None = None,
    bridge: dict[str, Any] | None = None,
    **more: Any,
) -> AsyncIterator[WebhookPublisher]:
    clock = clock or Clock()
    to = bridge_to(url, **(INSIDE if options is None else options))
    to = replace(to, settings=replace(to.settings, **(bridge or {})))
    publisher = WebhookPublisher(to, **{"now": clock.now, "pause": clock.pause} | more)
    assert await publisher.open() == 0
    try:
        yield publisher
    finally:
        await publisher.close()


def record(number: int = 0, key: str | None = "k", **other: Any) -> Record:
    id = uuid4()
    given = message(number, seq=next(ROWS), message_id=id, key=str(id) if key is None else key, **other)
    return record_of(given, Form(), SENDER)


async def post_all(publisher: WebhookPublisher, *records: Record) -> None:
    """Publish, and wait for those too that wait apart."""
    await publisher.publish(records)
    async with asyncio.timeout(WITHIN_S):
        while publisher.waiting:
            await asyncio.sleep(0.01)
            await publisher.publish([])


def refused(address: str, **options: str) -> str:
    with pytest.raises(MailroomError) as caught:
        WebhookPublisher(bridge_to(address, **options))
    return f"{caught.value} [{caught.value.code}]"


# -- The request -------------------------------------------------------------------------------------------------------


async def test_request_is_signed_and_is_an_event_of_cloudevents(receiver: Receiver) -> None:
    headers = {
        "tenant": "50% of",
        "a_b": "under",
        "né": "é",
        "Host": "evil",
        "ce-id": "evil",
        "Accept-X": "x",
        "T": "2",
    }
    given = record(7, 'k \N{LATIN SMALL LETTER E WITH ACUTE}%"', headers=headers | {"t": "1"})
    async with publishing(receiver.url) as publisher:
        await publisher.publish([given])
    [posted] = receiver.posted
    assert (posted.target, posted.body) == ("/hooks", b"7")
    assert verify(posted.headers, posted.body, [SECRET], NOW) == str(given.id)
    told = posted.headers
    assert (told["ce-id"], told["ce-type"], told["ce-specversion"]) == (str(given.id), "order.paid", "1.0")
    assert told["ce-subject"] == "k%20%C3%A9%25%22"
    assert told["ce-sequence"] == f"{77:019}"
    assert told["content-type"] == "application/json"
    assert told["host"] == f"127.0.0.1:{receiver.port}"
    assert (told["tenant"], told["t"]) == ("50% of", "2")
    assert json.loads(told["mailroom-headers"]) == {
        "a_b": "under", "né": "é", "Host": "evil", "ce-id": "evil", "Accept-X": "x", "t": "1",
    }  # fmt: skip


async def test_while_a_secret_is_replaced_both_sign_each_attempt_anew(receiver: Receiver) -> None:
    receiver.answers((500, {}))
    clock = Clock()
    async with publishing(receiver.url, clock, INSIDE | {"secrets": f"{SECRET}, {OTHER}"}) as publisher:
        await post_all(publisher, record())
    assert len(receiver.posted) == 2
    for posted in receiver.posted:
        for secret in (SECRET, OTHER):
            verify(posted.headers, posted.body, [secret], NOW)
        with pytest.raises(SignatureRefused):
            verify(posted.headers, posted.body + b" ", [SECRET, OTHER], NOW)


async def test_topic_stands_in_the_path_and_the_whole_url_may_come_from_the_environment(receiver: Receiver) -> None:
    url = f"http://127.0.0.1:{receiver.port}/topics/{{topic}}"
    async with publishing(url) as publisher:
        await publisher.publish([record(topic="a/b.c")])
    async with publishing("https://elsewhere.example/", None, INSIDE | {"url": f"{url}?token=t"}) as publisher:
        await publisher.publish([record()])
    assert [posted.target for posted in receiver.posted] == ["/topics/a%2Fb.c", "/topics/order.paid?token=t"]


async def test_tombstone_has_no_body_and_unsigned_is_as_it_says(receiver: Receiver) -> None:
    given = record_of(message(event_type="D"), Form(tombstones=True), SENDER)
    async with publishing(receiver.url, None, {"unsigned": "yes", "private": "yes"}) as publisher:
        await publisher.publish([given])
    [posted] = receiver.posted
    assert posted.body == b""
    assert {"webhook-signature", "content-type"}.isdisjoint(posted.headers)


# -- Order, and what holds up what -------------------------------------------------------------------------------------


def holding(receiver: Receiver, held: Callable[[Posted], bool]) -> asyncio.Event:
    """Answer those only once the event is set."""
    freed = asyncio.Event()

    async def answer(posted: Posted) -> Told:
        if held(posted):
            await freed.wait()
        return 200, {}

    receiver.answer = answer
    return freed


async def test_messages_of_a_key_are_posted_one_after_another_and_keys_beside_each_other(receiver: Receiver) -> None:
    freed = holding(receiver, lambda posted: posted.headers["ce-subject"] == "slow")
    slow = [record(n, "slow") for n in range(3)]
    quick = [record(n, f"k{n % 2}") for n in range(10, 20)]
    async with publishing(receiver.url) as publisher:
        task = asyncio.create_task(publisher.publish([*slow, *quick]))
        await eventually_async(lambda: len(receiver.posted) >= 11)
        assert not task.done()
        assert [posted.id for posted in receiver.posted if posted.headers["ce-subject"] == "slow"] == [str(slow[0].id)]
        freed.set()
        await task
    for key in ("slow", "k0", "k1"):
        came = [posted.body for posted in receiver.posted if posted.headers["ce-subject"] == key]
        assert came == sorted(came)


async def test_there_are_never_more_than_so_many_requests_at_once(receiver: Receiver) -> None:
    freed = holding(receiver, lambda posted: True)
    async with publishing(receiver.url) as publisher:
        task = asyncio.create_task(publisher.publish([record(n, None) for n in range(40)]))
        await eventually_async(lambda: len(receiver.posted) == AT_ONCE)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(receiver.posted) == AT_ONCE
        freed.set()
        await task
    assert len(receiver.posted) == 40


async def test_keys_that_fail_hold_up_no_other_ones(receiver: Receiver) -> None:
    """Also if they are more than there are requests at once, and also those of later batches."""
    mended = asyncio.Event()

    async def answer(posted: Posted) -> Told:
        return (500, {}) if "bad" in posted.headers["ce-subject"] and not mended.is_set() else (200, {})

    async def pause(seconds: float) -> None:
        await mended.wait()

    receiver.answer = answer
    bad = [record(n, f"bad{n}") for n in range(AT_ONCE + 4)]
    behind = record(99, "bad0")
    good = [record(n, "good") for n in range(3)]
    async with publishing(receiver.url, pause=pause) as publisher:
        await publisher.publish([*bad, behind, *good])
        assert len(receiver.posted) == AT_ONCE + 4 + 3
        await publisher.publish([later := record(98, "bad1"), record(4, "good")])
        assert receiver.bodies().count(b"4") == 2
        assert list(publisher.waiting) == [each.seq for each in (*bad, behind, later)]
        why = publisher.waiting[bad[0].seq]
        assert why is not None
        assert isinstance(why.why, Answered)
        assert why.why == f"the receiver answers 500 Internal Server Error (message {bad[0].id})"
        assert publisher.waiting[behind.seq] is None
        assert not {b"99", b"98"} & {*receiver.bodies()}
        mended.set()
        await post_all(publisher)
        assert publisher.trouble is None
    for body in (b"99", b"98"):
        assert receiver.bodies().count(body) == 1


async def test_keys_that_wait_apart_take_few_of_the_requests_at_once(receiver: Receiver) -> None:
    freed, again, since = asyncio.Event(), list[str](), set[str]()

    async def answer(posted: Posted) -> Told:
        if posted.headers["ce-subject"] == "good":
            return 200, {}
        if posted.id not in since:
            since.add(posted.id)
            return 500, {}
        again.append(posted.id)
        await freed.wait()
        return 200, {}

    receiver.answer = answer
    async with publishing(receiver.url) as publisher:
        await publisher.publish([record(n, f"bad{n}") for n in range(AT_ONCE + 4)])
        await eventually_async(lambda: len(again) == AGAIN_AT_ONCE)
        await publisher.publish([record(n, "good") for n in range(3)])
        assert len(again) == AGAIN_AT_ONCE
        freed.set()
        await post_all(publisher)


async def test_more_than_so_many_that_wait_hold_up_all(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_publisher, "MOST_APART", 3)
    mended = asyncio.Event()

    async def answer(posted: Posted) -> Told:
        return (204, {}) if mended.is_set() else (500, {})

    async def pause(seconds: float) -> None:
        await mended.wait()

    receiver.answer = answer
    async with publishing(receiver.url, pause=pause) as publisher:
        await publisher.publish([record(n, f"k{n}") for n in range(3)])
        full = asyncio.create_task(publisher.publish([record(4, "k1")]))
        await eventually_async(lambda: len(publisher.waiting) == 4)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not full.done()
        mended.set()
        await full


async def test_close_ends_at_once_whatever_is_under_way(receiver: Receiver) -> None:
    freed = holding(receiver, lambda posted: posted.body == b"1")

    async def pause(seconds: float) -> None:
        await freed.wait()

    async with publishing(receiver.url, pause=pause) as publisher:
        task = asyncio.create_task(publisher.publish([record(1, "k"), record(2, "other")]))
        await eventually_async(lambda: len(receiver.posted) == 2)
        await publisher.close()
        with pytest.raises(BrokerTrouble, match="given up"):
            await task
        with pytest.raises(BrokerTrouble):
            await publisher.publish([record()])


# -- Answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ((400, {}), "answers 400 Bad Request"),
        ((404, {}), "answers 404 Not Found"),
        ((599, {}), "answers 599"),
        ((302, {"location": "http://127.0.0.1/other?token=geheim"}), "redirects are not followed"),
        (None, "broke off"),
    ],
)
async def test_other_answers_are_told_and_posted_again(receiver: Receiver, told: Told, why: str) -> None:
    receiver.answers(told, told)
    answered, seen, afterwards = receiver.answer, list[str | None](), list[str | None]()

    async def answer(posted: Posted) -> Told:
        if posted.body == b"2":
            afterwards.append(publisher.trouble)
        return await answered(posted)

    receiver.answer = answer

    async def pause(seconds: float) -> None:
        seen.append(publisher.trouble)

    async with publishing(receiver.url, pause=pause) as publisher:
        await post_all(publisher, record(1), record(2))
    assert receiver.bodies() == [b"1", b"1", b"1", b"2"]
    assert {posted.target for posted in receiver.posted} == {"/hooks"}
    assert (len(seen), afterwards) == (2, [None])
    assert all(text is not None and why in text and "geheim" not in text for text in seen)


async def test_longer_and_longer_pauses_up_to_a_bound(receiver: Receiver) -> None:
    receiver.answers(*[(500, {})] * 30)
    clock = Clock()
    async with publishing(receiver.url, clock) as publisher:
        await post_all(publisher, record())
    assert len(clock.pauses) == 30
    assert clock.pauses[0] <= 0.2
    assert 2 < max(clock.pauses) <= 30


async def test_gone_stops_the_bridge(receiver: Receiver) -> None:
    receiver.answers((410, {}))
    async with publishing(receiver.url) as publisher:
        with pytest.raises(BrokerRefused, match="410 Gone: it wants no more messages") as caught:
            await publisher.publish([record(1), record(2)])
    assert caught.value.code == "MR-bridge-broker-refused"
    assert len(receiver.posted) == 1


async def test_record_that_is_too_large_waits_apart_and_can_be_left_out(receiver: Receiver) -> None:
    receiver.answers((413, {}), (204, {}), (431, {}))
    given = record(1)
    async with publishing(receiver.url, bridge={"on_failure": "skip"}) as publisher:
        for large in (record(1), record(2)):
            await publisher.publish([large, given])
            why = publisher.waiting[large.seq]
            assert why is not None
            assert "to a value of 1 bytes" in str(why.error)
            assert publisher.waiting[given.seq] is None
            await publisher.publish([])  # it is not tried again
            publisher.leave_out(large.seq)
            await eventually_async(lambda: not publisher.waiting)
    assert receiver.bodies() == [b"1", b"1", b"2", b"1"]


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_obeyed_by_all_keys(receiver: Receiver, status: int) -> None:
    clock = Clock()
    came: list[float] = []

    async def answer(posted: Posted) -> Told:
        came.append(clock.at)
        return (status, {"retry-after": "120"}) if len(came) == 1 else (200, {})

    receiver.answer = answer
    async with publishing(receiver.url, clock) as publisher:
        await publisher.publish([record(1, "first")])
        assert came[1] >= came[0] + 120
        await publisher.publish([record(n, f"k{n}") for n in range(5)])
        begun = len(came)
        receiver.answers((status, {"Retry-After": formatdate(clock.at + 600, usegmt=True)}))
        at = clock.at
        await publisher.publish([record(1, "one")])
    assert begun == 7
    assert clock.at >= at + 599


def test_retry_after_is_read() -> None:
    given = {
        None: 0, "7": 7, "99999": 3_600, "-7": 0, "soon": 0, "": 0, "7.5": 0, "9" * 10: 3_600, "9" * 5_000: 3_600,
        formatdate(NOW + 90, usegmt=True): 90, formatdate(NOW - 90, usegmt=True): 0, formatdate(NOW + 90_000): 3_600,
        "Fri, 31 Dec 9999 23:59:59 GMT": 3_600, "Fri, 31 Dec 9999 23:59:59 -9959": 3_600,
        "Fri, 01 Jan 10000 00:00:00 GMT": 3_600, f"Fri, 01 Jan {'9' * 40} 00:00:00 GMT": 3_600,
        "Mon, 01 Jan 0001 00:00:00 +9999": 0, "Mon, 31 Feb 2030 00:00:00 GMT": 0, "Mon, 01 Jan 2030 99:00:00 GMT": 0,
        f"Mon, {'9' * 40} Jan 2030 00:00:00 GMT": 0, f"Mon, 01 Jan 2030 00:00:00 +{'9' * 40}": 0,
        f"Mon, 01 Jan {'9' * 5_000} 00:00:00 GMT": 0,
    }  # fmt: skip
    assert {text: retry_after_s(text, NOW) for text in given} == given


async def test_no_answer_in_time_is_told_and_posted_again(receiver: Receiver) -> None:
    freed = holding(receiver, lambda posted: len(receiver.posted) == 1)
    seen: list[str | None] = []

    async def pause(seconds: float) -> None:
        seen.append(publisher.trouble)

    async with publishing(receiver.url, timeout_s=0.1, pause=pause) as publisher, asyncio.timeout(WITHIN_S):
        await post_all(publisher, record(1))
    freed.set()
    # On a slow machine the second answer may not come in time either, and a request may not even be read.
    assert {text and text.partition(" (")[0] for text in seen} == {"the receiver has not answered within 0.1 s"}
    assert set(receiver.bodies()) == {b"1"}


async def test_body_of_an_answer_that_never_ends_changes_nothing(receiver: Receiver) -> None:
    receiver.answers(*[(200, {"content-length": "10"})] * 1_000)
    # It is posted again only if the status has not come in time: the body never comes.
    async with publishing(receiver.url, timeout_s=0.2) as publisher, asyncio.timeout(WITHIN_S):
        await post_all(publisher, record(1))
    assert set(receiver.bodies()) == {b"1"}


async def test_refused_connection_is_told_until_somebody_listens(receiver: Receiver) -> None:
    seen: list[str | None] = []
    targets = iter(["127.0.0.2", "127.0.0.1"])

    async def pause(seconds: float) -> None:
        seen.append(publisher.trouble)

    async def resolving(host: str, port: int) -> list[str]:
        return [next(targets)]

    url = f"http://localhost:{receiver.port}/hooks"
    async with publishing(url, pause=pause, resolve=resolving) as publisher:
        await publisher.publish([record(1)])
    assert receiver.bodies() == [b"1"]
    [told] = seen
    assert told is not None
    assert "is not reached" in told


# -- Where it may post to ----------------------------------------------------------------------------------------------


def test_private_addresses_are_known() -> None:
    """Also those that Python takes for public, in one version or in all."""
    public = [
        "93.184.216.34", "192.0.1.1", "168.63.129.15", "2606:2800:220:1::1", "2001:4860:4860::8888",
        "64:ff9b::5db8:d822", "::ffff:93.184.216.34",
    ]  # fmt: skip
    private = [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fd00::1", "ff02::1", "ff0e::1",
        # of special use, also where it is said to be reachable
        "192.0.0.8", "192.0.0.9", "192.88.99.1", "198.18.0.1", "192.31.196.1", "100::1", "2001:2::1", "2001:20::1",
        "3fff::1", "5f00::1", "fec0::1", "4000::1",
        # of clouds
        "192.0.0.192", "100.100.100.200", "168.63.129.16", "199.36.153.8", "161.26.0.7", "166.9.1.1", "fd00:ec2::254",
        "2600:2d00:2:2000::", "2600:2d00:2:10ff::1", "2001:4860:8050::1",
        # standing for an IPv4 address: mapped, translated, compatible, NAT64, 6to4, Teredo, ISATAP
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:192.0.0.192", "::ffff:0:127.0.0.1", "::127.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b::a83f:8110", "64:ff9b:1::7f00:1", "64:ff9b:1::5db8:d822", "64:ff9b:0:1::5db8:d822",
        "2002:7f00:1::", "2002:5db8:d822::", "2001:0:1::1", "2606:2800:220:1:0:5efe:10.0.0.1",
        "2606:2800:220:1:200:5efe:10.0.0.1",
    ]  # fmt: skip
    assert [address for address in public + private if is_public(address)] == public


async def test_private_address_is_refused_also_by_name(receiver: Receiver) -> None:
    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433"):
        url = f"http://{host}:{receiver.port}/geheim"
        async with publishing(url, None, {"secrets": SECRET, "http": "yes"}) as publisher:
            with pytest.raises(BrokerRefused, match="MAILROOM_BRIDGE_HOOKS_PRIVATE=yes") as caught:
                await publisher.publish([record()])
        assert "geheim" not in str(caught.value)
        assert receiver.posted == []


async def test_address_that_was_checked_is_connected_to_and_each_connection_is_checked(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads to another address each time; and proxies of the environment are not asked."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    connected: list[str] = []
    answers = iter([["93.184.216.34", "10.0.0.1", "2606:2800:220:1::1"], ["127.0.0.1"]])

    async def connect(self: object, host: str, *rest: object) -> Any:
        connected.append(host)
        raise httpcore.ConnectError("nobody")

    async def resolving(host: str, port: int) -> list[str]:
        assert (host, port) == ("hooks.example", 80)
        return next(answers)

    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    options = {"secrets": SECRET, "http": "yes"}
    async with publishing("http://hooks.example/", None, options, resolve=resolving) as publisher:
        with pytest.raises(BrokerRefused, match="no public address"):
            await publisher.publish([record()])
    assert connected == ["93.184.216.34", "2606:2800:220:1::1"]


async def test_name_that_does_not_exist_is_trouble() -> None:
    for name in ("nowhere.invalid", f"{'a' * 64}.example"):
        with pytest.raises(httpcore.ConnectError, match="its name is not resolved"):
            await resolve(name, 80)


async def test_name_whose_server_does_not_answer_holds_one_thread_and_no_other_bridge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered, getaddrinfo = list[str](), threading.Event(), socket.getaddrinfo

    def asking(host: str, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        if host == "dead.example":
            answered.wait(WITHIN_S)
        return getaddrinfo("127.0.0.1", *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", asking)
    waiting = [asyncio.create_task(resolve("dead.example", 80)) for _ in range(40)]
    await eventually_async(lambda: asked == ["dead.example"])
    waiting[0].cancel()  # as a time-out does; the others still get the answer
    assert await resolve("hooks.example", 80) == ["127.0.0.1"]
    answered.set()
    assert await asyncio.gather(*waiting[1:]) == [["127.0.0.1"]] * 39
    assert await resolve("dead.example", 80) == ["127.0.0.1"]
    assert asked == ["dead.example", "hooks.example", "dead.example"]


def test_url_that_is_none_or_would_show_a_secret_is_refused_and_not_repeated() -> None:
    for url, told in [
        ("https://user:geheim@h.example/", "holds a user or a password"),
        ("https://h.example/?token=geheim", "MAILROOM_BRIDGE_<NAME>_URL"),
        ("https://h.example/#geheim", "#fragment"),
        ("ftp://h.example/geheim", "not http://"),
        ("https:///geheim", "not http://"),
        ("https://h.example:x/geheim", "not http://"),
        ("https://h.example/ge heim", "not http://"),
        ("https://h.example/{key}/geheim", "no other braces"),
        ("https://{topic}.example/geheim", "no other braces"),
        ("h.example:443", "not http://"),
    ]:
        with pytest.raises(ConfigurationError, match="URL of a webhook") as caught:
            OutSettings("webhook", url)
        assert told in str(caught.value), url
        assert "geheim" not in str(caught.value)


def test_options_are_checked_before_anything_is_posted() -> None:
    url = "https://h.example/"
    assert "MAILROOM_BRIDGE_HOOKS_UNSIGNED=yes" in refused(url)
    assert "no option secret" in refused(url, secret="x")
    assert "PRIVATE is yes or no" in refused(url, secrets=SECRET, private="maybe")
    assert "Use https://" in refused("http://h.example/", secrets=SECRET)
    told = refused(url, secrets=f"{SECRET},whsec_geheim")
    assert "MR-webhook-secret-invalid" in told
    assert "geheim" not in told
    assert "user or a password" in refused(url, secrets=SECRET, url="https://u:geheim@h.example/")
    WebhookPublisher(bridge_to("http://localhost:1/", secrets=SECRET))
    WebhookPublisher(bridge_to("http://h.example/", secrets=SECRET, http="yes"))


def test_webhooks_are_at_least_once_out_and_come_in_by_a_server() -> None:
    for wrong in ({"exactly_once": True, "mark_topic": "m"}, {"form": Form(format="plain")}):
        with pytest.raises(ConfigurationError, match=r"ebhook is (at least once|cloudevents)"):
            OutSettings("webhook", "https://h.example/", **wrong)
    with pytest.raises(ConfigurationError, match="mailroom bridge serve"):
        InSettings("webhook", "https://h.example/", ("t",))


# -- Through the dispatcher --------------------------------------------------------------------------------------------


@pytest.fixture
def hooks(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the bridge "hooks" is given."""
    monkeypatch.setenv("MAILROOM_BRIDGE_HOOKS_SECRETS", SECRET)
    monkeypatch.setenv("MAILROOM_BRIDGE_HOOKS_PRIVATE", "yes")


def bridged(node: Node, url: str) -> None:
    with node.connection.transaction():
        Bridges().out(node.connection, "hooks", OutSettings("webhook", url), topics="order.#", actor="test")


@pytest.mark.slow
@pytest.mark.usefixtures("hooks")
async def test_message_comes_to_another_node_once_though_it_is_posted_twice(
    node: Node, target_dsn: str, receiver: Receiver
) -> None:
    bridged(node, f"http://127.0.0.1:{receiver.port}/topics/{{topic}}")
    ids = [node.send("order.paid", {"n": n}, key="k é", headers={"user": "ada"}) for n in range(3)]
    node.deliver_all()
    lost = set[str]()
    async with WebhookApp(target_dsn, [SECRET], topics=["order.#"]) as app, client_of(app) as client:

        async def answer(posted: Posted) -> Told:
            found: httpx.Response = await client.post(posted.target, content=posted.body, headers=posted.headers)
            if posted.id in lost:
                return found.status_code, {}
            lost.add(posted.id)
            return None

        receiver.answer = answer
        async with tended(node):
            await eventually_async(lambda: node.value("SELECT acked FROM mailroom.link") == 3)
    assert [posted.id for posted in receiver.posted] == [str(id) for id in ids for _ in range(2)]
    with psycopg.connect(target_dsn) as connection:
        came = connection.execute("SELECT key, headers ->> 'ce_id' FROM mailroom.outbox ORDER BY position").fetchall()
    assert came == [("k é", str(id)) for id in ids]


@pytest.mark.usefixtures("hooks", "impatient")
async def test_bridge_tells_why_it_stands_and_shows_no_secret(
    node: Node, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MAILROOM_BRIDGE_HOOKS_URL", f"{receiver.url}/weg?token=geheim")
    bridged(node, "https://hooks.example/")
    node.send("order.paid", "wert", key="k")
    node.deliver_all()
    status = [500]

    async def answer(posted: Posted) -> Told:
        return status[0], {}

    receiver.answer = answer
    async with tended(node):
        await eventually_async(lambda: "answers 500" in (out_state(node).why or ""))
        assert out_state(node).state == "refused"
        status[0] = 410
        await eventually_async(lambda: out_state(node).state == "stopped")
        why = out_state(node).why or ""
    assert "410 Gone" in why
    assert "mailroom bridge remove hooks" in why
    assert receiver.posted[0].target == "/hooks/weg?token=geheim"
    mine = [each.getMessage() for each in caplog.records if each.name.startswith("mailroom")]
    assert any("answers 500" in text for text in mine)
    for text in (*mine, why, *(each.getMessage() for each in caplog.records if each.name.startswith("http"))):
        for secret in ("geheim", "weg", SECRET, "wert", receiver.posted[0].headers["webhook-signature"]):
            assert secret not in text


@pytest.mark.usefixtures("hooks", "impatient")
async def test_refused_message_holds_up_its_key_only_and_can_be_skipped(node: Node, receiver: Receiver) -> None:
    """Nor is what was posted around it posted again by the next dispatcher, or after the skip."""
    bridged(node, receiver.url)
    bad = [node.send("order.paid", key="bad") for _ in range(2)]
    good = [node.send("order.paid", key=f"k{n}") for n in range(3)]
    node.deliver_all()

    async def answer(posted: Posted) -> Told:
        return 400 if posted.id == str(bad[0]) else 204, {}

    receiver.answer = answer
    async with tended(node):
        await eventually_async(lambda: out_state(node).state == "refused")
        good += [node.send("order.paid", key="k1")]
        node.deliver_all()
        await eventually_async(lambda: (out_state(node).acked, out_state(node).backlog) == (0, 2))
    state = out_state(node)
    assert state.state == "refused"
    assert "row 1 waits, and what is behind it in its key: the receiver answers 400 Bad Request" in (state.why or "")
    assert "mailroom bridge skip hooks --row 1" in (state.why or "")
    with node.connection.transaction():
        assert [each.id for each in Bridges().waiting(node.connection, "hooks")] == bad
    async with tended(node) as lane:
        good += [node.send("order.paid", key="k2")]
        node.deliver_all()
        await eventually_async(lambda: str(good[-1]) in [posted.id for posted in receiver.posted])
        assert await beside(node, lambda it: Bridges().skip(it, "hooks", 1, actor="me")) == bad[0]
        await lane.follow_until(lambda: out_state(node).acked == 7)
        await eventually_async(lambda: out_state(node).state == "open")
        assert node.value("SELECT count(*) FROM mailroom.bridge_done") == 0
    posted = [each.id for each in receiver.posted if each.headers["ce-subject"] != "bad"]
    assert sorted(posted) == sorted(map(str, good))
    assert [each.id for each in receiver.posted].count(str(bad[1])) == 1
    assert node.rows("SELECT message_id, stage, bridge FROM mailroom.dead_letter") == [(bad[0], "publish", "hooks")]


@pytest.mark.usefixtures("hooks", "impatient")
@pytest.mark.parametrize(("status", "state"), [(410, "stopped"), (413, "refused")])
async def test_what_a_receiver_has_taken_is_not_posted_again_by_each_try(
    node: Node, receiver: Receiver, status: int, state: str
) -> None:
    bridged(node, receiver.url)
    node.send("order.paid", key="bad")
    good = [node.send("order.paid", key=f"k{n}") for n in range(5)]
    node.deliver_all()
    taken = asyncio.Event()

    async def answer(posted: Posted) -> Told:
        if posted.headers["ce-subject"] != "bad":
            if len({each.id for each in receiver.posted} - {posted.id}) >= 5:
                taken.set()
            return 204, {}
        await taken.wait()
        return status, {}

    receiver.answer = answer
    async with tended(node):
        await eventually_async(lambda: len([each for each in receiver.posted if each.body == b"null"]) >= 5 + 3)
        await eventually_async(lambda: (out_state(node).state, out_state(node).backlog) == (state, 1))
    posted = [each.id for each in receiver.posted if each.headers["ce-subject"] != "bad"]
    assert sorted(posted) == sorted(map(str, good))


@pytest.mark.usefixtures("hooks")
async def test_too_large_message_is_skipped_and_its_key_goes_on(node: Node, receiver: Receiver) -> None:
    with node.connection.transaction():
        settings = OutSettings("webhook", receiver.url, on_failure="skip")
        Bridges().out(node.connection, "hooks", settings, topics="order.#", actor="test")
    first, second = (node.send("order.paid", key="k") for _ in range(2))
    node.deliver_all()
    receiver.answers((413, {}))
    async with tended(node):
        await eventually_async(lambda: out_state(node).acked == 2)
    assert [posted.id for posted in receiver.posted] == [str(first), str(second)]
    assert node.value("SELECT message_id FROM mailroom.dead_letter") == first


def test_headers_need_no_secrets_to_be_made() -> None:
    found: Sequence[tuple[bytes, bytes]] = headers_of(record(), NOW, ())
    assert dict(found)[b"webhook-timestamp"] == str(NOW).encode()
    assert UUID(dict(found)[b"webhook-id"].decode())
