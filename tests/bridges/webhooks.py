"""A sender of webhooks, and what it is answered."""

import json
from typing import Any

import httpx

from outbox.webhooks.signature import sign

SECRET = "whsec_" + "QUJD" * 8
OTHER = "whsec_" + "REVG" * 8
NOW = 1_800_000_000


def signed(
    body: bytes, id: str = "msg_1", *, at: int = NOW, secrets: tuple[str, ...] = (SECRET,), **more: str
) -> dict[str, str]:
    """Return the headers of a request, which is signed; `more` are others."""
    headers = {
        "webhook-id": id,
        "webhook-timestamp": str(at),
        "webhook-signature": sign(id, at, body, secrets),
        "content-type": "application/json",
    }
    return headers | {name.replace("_", "-"): value for name, value in more.items()}


def client_of(app: Any, base_url: str = "http://mailroom") -> httpx.AsyncClient:
    """Return a client of an ASGI app; what the app raises reaches the test."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url, timeout=60)


async def post(
    client: httpx.AsyncClient, body: bytes = b'{"order": 1}', id: str = "msg_1", path: str = "/topics/order.paid",
    **headers: Any,
) -> httpx.Response:  # fmt: skip
    """Send a signed request; `headers` are the other arguments of `signed`."""
    return await client.post(path, content=body, headers=signed(body, id, **headers))


def refused(response: httpx.Response) -> tuple[int, str]:
    """Return status and code of a refusal, whose answer is one line of JSON."""
    [line] = response.text.splitlines()
    answer = json.loads(line)
    assert set(answer) == {"code", "error"}
    assert answer["error"]
    assert response.headers["content-type"] == "application/json"
    assert "Traceback" not in line
    return response.status_code, answer["code"].removeprefix("MR-").removeprefix("webhook-")
