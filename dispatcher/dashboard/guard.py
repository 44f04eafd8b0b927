"""What stands before every page: which Host, Origin and user a request has, and what a browser may do with the answer.

A page in another tab can have the user's browser ask for anything here. So the Host has to be a name that is known (a
name of the attacker's can be made to lead to 127.0.0.1), and a change has to come from one of our pages: by
its Origin, and with a token that only our pages hold.
"""

import hashlib
import hmac
import inspect
import secrets
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dispatcher.dashboard.access import Resolver, Tokens, User, named, user_of

LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
SAFE = ("GET", "HEAD")
SESSION_S = 12 * 3600
BROWSER, LOGIN = "mailroom_browser", "mailroom_login"

# Nothing is loaded from elsewhere, no script or style stands in a page, and no other site may show ours in a frame.
# D-dashboard-3: Each of Host, Origin and the token of the form is checked.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Without any Referrer a browser would send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Refused(Exception):
    """The request is refused, with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


class Signer:
    """Signs what a browser is given to give back: texts for one purpose each, by a key that only the server has."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def signature(self, purpose: str, text: str) -> str:
        """Return the signature of a text."""
        return hmac.new(self._secret, f"{purpose}\0{text}".encode(), hashlib.sha256).hexdigest()

    def signed(self, purpose: str, text: str) -> str:
        """Return the text with its signature, for a cookie."""
        return f"{text.encode().hex()}.{self.signature(purpose, text)}"

    def read(self, purpose: str, cookie: str) -> str | None:
        """Return the text of a cookie, None if its signature is not ours."""
        encoded, _, signature = cookie.partition(".")
        try:
            text = bytes.fromhex(encoded).decode()
        except ValueError:
            return None
        is_ours = hmac.compare_digest(self.signature(purpose, text).encode(), signature.encode(errors="replace"))
        return text if is_ours else None


class Logins:
    """Who has typed a token into the page: a cookie says so until the log-out, or until the token is replaced.

    A log-out is remembered in this process, so that a copy of its cookie ends with it. Other processes that serve the
    dashboard do not hear of it.
    """

    def __init__(self, tokens: Tokens, signer: Signer) -> None:
        self._tokens, self._signer = tokens, signer
        self._ended: dict[str, float] = {}  # each log-in that has been ended, and until when its cookie would be good

    def begin(self, token: str) -> str | None:
        """Return a cookie for the user with this token, None if no user has it."""
        user = user_of(self._tokens, token)
        if user is None:
            return None
        until, number = time.time() + SESSION_S, secrets.token_hex(8)
        return self._signer.signed(LOGIN, f"{user.name} {number} {until} {self._signer.signature(LOGIN, token)}")

    def user(self, request: Request) -> User | None:
        """Return the user whose cookie a request has."""
        found = self._read(request)
        if found is None:
            return None
        name, number, until, proof = found
        holder = named(self._tokens, name)
        if holder is None or number in self._ended or until <= time.time():
            return None
        token, user = holder
        return user if hmac.compare_digest(self._signer.signature(LOGIN, token), proof) else None

    def end(self, request: Request) -> None:
        """Have the cookie of a request count no more."""
        if found := self._read(request):
            now = time.time()
            self._ended = {number: until for number, until in self._ended.items() if until > now}
            self._ended[found[1]] = found[2]

    def _read(self, request: Request) -> tuple[str, str, float, str] | None:
        text = self._signer.read(LOGIN, request.cookies.get(LOGIN, ""))
        if text is None:
            return None
        name, number, until, proof = text.split(" ")
        return name, number, float(until), proof


class Guard:
    """The middleware: puts the user into the request's state, or answers itself."""

    def __init__(self, app: ASGIApp, resolve: Resolver, hosts: Collection[str], logins: Logins | None) -> None:
        self._app, self._resolve, self._logins = app, resolve, logins
        self._hosts = LOOPBACK | {each.lower() for each in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        request = Request(scope, receive)
        try:
            self._check(request)
            found = await self._user(request)
        except Refused as refused:
            await PlainTextResponse(refused.text + "\n", refused.status)(scope, receive, send_guarded)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        request.state.user = found
        if found is None and path != "/login" and not path.startswith("/static/"):
            await self._unknown(request)(scope, receive, send_guarded)
            return
        await self._app(scope, receive, send_guarded)

    def _check(self, request: Request) -> None:
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or _name(hosts[0]) not in self._hosts:
            raise Refused(421, "This dashboard does not answer to that Host. Name it: --host, or hosts= of app().")
        if request.method not in SAFE:
            if request.method != "POST":
                raise Refused(405, "Only GET, HEAD and POST.")
            check_origin(request.headers, hosts[0])

    async def _user(self, request: Request) -> User | None:
        found = self._resolve(request)
        user = await found if inspect.isawaitable(found) else found
        return self._logins.user(request) if user is None and self._logins else user

    def _unknown(self, request: Request) -> Response:
        if self._logins:
            if request.method in SAFE and "authorization" not in request.headers:
                return RedirectResponse(request.scope.get("root_path", "") + "/login", 303)
            return PlainTextResponse("No token of this dashboard's.\n", 401, {"www-authenticate": "Bearer"})
        return PlainTextResponse("Who you are is not known here, or you may not see this.\n", 403)


def _name(host: str) -> str:
    """Return the name of a Host header without its port."""
    name, colon, port = host.lower().rpartition(":")
    return name if colon and port.isdecimal() else host.lower()


def check_origin(headers: Headers, host: str) -> None:
    """Raise `Refused` unless a page of this very host sends what changes something."""
    origins = headers.getlist("origin")
    try:
        origin = urlsplit(origins[0]) if len(origins) == 1 else None
        same = origin is not None and origin.scheme in ("http", "https") and origin.netloc.lower() == host.lower()
    except ValueError:
        same = False
    if not same or headers.get("sec-fetch-site", "same-origin") != "same-origin":
        raise Refused(403, "This comes from another origin, or from none. Use the page's own buttons.")


class Browsers:
    """A number for each browser, in a cookie, and the token that our forms carry for it and its user."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def of(self, request: Request) -> tuple[str, bool]:
        """Return the browser's number, and whether it is a new one, to be set."""
        known = self._signer.read(BROWSER, request.cookies.get(BROWSER, ""))
        return (known, False) if known else (secrets.token_hex(16), True)

    def token(self, browser: str, user: User) -> str:
        """Return the token of forms."""
        return self._signer.signature("form", f"{browser} {user.name}")

    def check(self, request: Request, user: User, fields: dict[str, str]) -> None:
        """Raise `Refused` unless the form is one that this browser and user were given."""
        browser, is_new = self.of(request)
        given = fields.pop("csrf", "").encode(errors="replace")
        if is_new or not hmac.compare_digest(self.token(browser, user).encode(), given):
            raise Refused(403, "This form is not of this session. Open the page again, and repeat it there.")

    def set(self, request: Request, response: Response, browser: str) -> None:
        """Give the browser its number."""
        set_cookie(request, response, BROWSER, self._signer.signed(BROWSER, browser), SESSION_S)


def set_cookie(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    """Set a cookie that no script reads, and that comes with no request from elsewhere."""
    response.set_cookie(
        name,
        value,
        max_age=seconds,
        path=request.scope.get("root_path", "") or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )
