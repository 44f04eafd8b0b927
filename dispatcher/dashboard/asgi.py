"""The ASGI app: which path is which page, and how errors are answered."""

import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any

import psycopg
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from dispatcher.dashboard import (
    failing_pages,
    inbox_pages,
    key_pages,
    log_pages,
    message_pages,
    node_pages,
    parked_pages,
)
from dispatcher.dashboard.access import READ_ONLY, Resolver, Tokens, User
from dispatcher.dashboard.actions import Acts
from dispatcher.dashboard.forms import read_form, unpacked
from dispatcher.dashboard.guard import (
    LOGIN,
    SESSION_S,
    Browsers,
    Guard,
    Logins,
    Refused,
    Signer,
    set_cookie,
)
from dispatcher.dashboard.looks import Looks
from dispatcher.dashboard.rendering import STATIC, environment, option
from dispatcher.dashboard.sessions import NodeSessions
from dispatcher.dashboard.shown import Asked, ShownNode
from mailroom.cli.call import Call
from mailroom.cli.failures import redacted, text_of
from mailroom.errors import (
    ConfigurationError,
    ConnectionFailed,
    InvalidMessage,
    InvalidName,
    MailroomError,
    UnknownInbox,
)
from mailroom.roles.advice import advice, is_denied
from mailroom.schema.acts import Act
from mailroom.session import settings
from mailroom.values.names import DEFAULT_SCHEMA, schema_name

log = logging.getLogger("mailroom.dashboard")

TOLD = "mailroom_told"
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
FILES = ("dashboard.css", "dashboard.js", "htmx.min.js", "icon.svg")
Read = Callable[[ShownNode, Asked], dict[str, Any]]


# D-dashboard-1: The dashboard is a room of the dispatcher.
def app(
    dsn: str | None = None,
    *,
    auth: Resolver,
    schema: str = DEFAULT_SCHEMA,
    hosts: Collection[str] = (),
    payloads: bool = False,
    secret: bytes | None = None,
) -> Starlette:
    """Return the dashboard of the node `schema` as an ASGI app, to be run or mounted below any path.

    `auth` says who asks and what that user may do: `Tokens`, `ProxyHeader`, or your own function that is given the
    request and returns a `User`, or None for an unknown user; it may be async. `hosts` are the names, without
    port, that requests may have in their Host beside those of this machine. With `payloads` the page of a message shows
    its headers and its value. `secret` signs what browsers are given; give all processes that serve one dashboard the
    same 32 bytes, by default each has its own.

    `dsn` is as for `mailroom.dsn`; its role needs the grant `auditor`, and `operator` for actions. Sessions are opened
    when they are needed, at most four that read. Raises `ConfigurationError` if nothing names a database.
    """
    if secret is not None and len(secret) < 32:
        raise ConfigurationError("secret is too short: give 32 random bytes.", code="MR-dashboard-access")
    schema = schema_name(schema)
    sessions = NodeSessions(settings.dsn(dsn), schema)
    signer = Signer(secret or secrets.token_bytes(32))
    node = ShownNode(schema, sessions, Looks(sessions, schema), payloads)
    logins = Logins(auth, signer) if isinstance(auth, Tokens) else None
    site = _Site(node, logins, signer)

    @contextlib.asynccontextmanager
    async def closing(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            sessions.close()

    made = Starlette(
        routes=site.routes(),
        middleware=[Middleware(Guard, resolve=auth, hosts=frozenset(hosts), logins=logins)],
        lifespan=closing,
    )
    made.state.sessions, made.state.signer = sessions, signer
    return made


class _Site:
    def __init__(self, node: ShownNode, logins: Logins | None, signer: Signer) -> None:
        self._node, self._logins, self._signer = node, logins, signer
        self._browsers = Browsers(signer)
        self._acts = Acts(node.schema)
        self._templates = environment()

    def routes(self) -> list[Route]:
        doctor = node_pages.Doctor()
        pages: Mapping[str, tuple[str, Read]] = {
            "/": ("overview", node_pages.overview),
            "/inboxes": ("inboxes", inbox_pages.inboxes),
            "/inboxes/{inbox}": ("inbox", inbox_pages.inbox),
            "/inboxes/{inbox}/key": ("key", inbox_pages.key),
            "/logs": ("logs", log_pages.logs),
            "/logs/{log}": ("log", log_pages.log),
            "/failing": ("failing", failing_pages.failing),
            "/parked": ("parked", parked_pages.parked),
            "/dead-letters": ("dead_letters", inbox_pages.dead_letters),
            "/message": ("message", message_pages.message),
            "/message/path": ("path", message_pages.path),
            "/message/key": ("found", key_pages.found),
            "/routes": ("routes", node_pages.routes),
            "/waiting": ("waiting", node_pages.waiting),
            "/executables": ("executables", node_pages.executables),
            "/workers": ("workers", node_pages.workers),
            "/links": ("links", node_pages.links),
            "/doctor": ("doctor", doctor.page),
            "/doctor/findings": ("findings", doctor.findings),
            "/audit": ("audit", node_pages.audit),
        }
        return [
            *(Route(path, self._page(name, read), methods=["GET"]) for path, (name, read) in pages.items()),
            *(Route(f"/act/{act.verb}/{act.of}", self._act(act), methods=["POST"]) for act in self._acts.known),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{name}", _static, methods=["GET"]),
            Route("/{path:path}", self._missing, methods=["GET", "POST"]),
        ]

    def _page(self, name: str, read: Read) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            try:
                asked = Asked(unpacked(request.query_params) | request.path_params)
                found = await run_in_threadpool(read, self._node, asked)
            except Exception as error:
                return self._failed(request, error)
            return self._rendered(request, name, found)

        return answer

    def _rendered(self, request: Request, name: str, found: dict[str, Any], status: int = 200) -> Response:
        browser, is_new = self._browsers.of(request)
        user: User | None = request.state.user
        base = request.scope.get("root_path", "")
        told = self._signer.read(TOLD, request.cookies.get(TOLD, "")) if user else None
        path = request.scope["path"].removeprefix(base)
        html = self._templates.get_template(f"{name}.html").render(
            base=base,
            here=base + path + (f"?{request.url.query}" if request.url.query else ""),
            path=path,
            user=user,
            may=user.may if user else READ_ONLY,
            csrf=self._browsers.token(browser, user) if user else "",
            node=self._node,
            whose=self._node.looks.place if user else None,
            option=option(self._node.schema),
            told=told,
            can_log_out=self._logins is not None,
            **found,
        )
        response = Response(html, status, media_type="text/html")
        if is_new:
            self._browsers.set(request, response, browser)
        if told is not None:
            response.delete_cookie(TOLD, path=base or "/", httponly=True, samesite="strict")
        return response

    def _failed(self, request: Request, error: Exception, purpose: str = "auditor") -> Response:
        if isinstance(error, Refused):
            return self._rendered(request, "error", {"status": error.status, "text": error.text}, error.status)
        if is_denied(error):
            text = f"The role of this dashboard may not do this. {advice(purpose, None, schema=self._node.schema)}"
            return self._rendered(request, "error", {"status": 503, "text": text}, 503)
        if isinstance(error, psycopg.errors.QueryCanceled):
            text = "It took the database longer than 2 s, so it was given up. Try again, or use the command."
            return self._rendered(request, "error", {"status": 503, "text": text}, 503)
        if not isinstance(error, MailroomError | psycopg.Error):
            raise error
        match error:
            case UnknownInbox():
                status = 404
            case ConnectionFailed() | psycopg.Error():
                status = 503
            case InvalidName() | InvalidMessage():
                status = 400
            case _:
                status = 409
        if status == 503:
            log.warning("%s: %s", request.url.path, type(error).__name__)
        return self._rendered(request, "error", {"status": status, "text": redacted(text_of(error, Call())[0])}, status)

    def _act(self, act: Act) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            user: User = request.state.user
            try:
                fields = await read_form(request)
                self._browsers.check(request, user, fields)
                back = fields.pop("back", "/")
                told = await run_in_threadpool(self._operated, user, act, fields)
            except Exception as error:
                return self._failed(request, error, "operator")
            base = request.scope.get("root_path", "")
            # Only to one of our pages: what a browser reads as the start of another site's address is not a path.
            is_ours = back.startswith("/") and not back.startswith(("//", "/\\")) and back.isprintable()
            response = RedirectResponse(base + (back if is_ours else "/"), 303)
            set_cookie(request, response, TOLD, self._signer.signed(TOLD, told), 60)
            return response

        return answer

    def _operated(self, user: User, act: Act, fields: dict[str, str]) -> str:
        try:
            with self._node.sessions.operating() as connection:
                told = self._acts.do(connection, user, act, fields)
        except (KeyError, ValueError) as error:
            if isinstance(error, MailroomError):
                raise
            raise Refused(400, "The form lacks a field, or has a wrong one.") from None
        self._node.looks.expire()
        return told

    async def _login(self, request: Request) -> Response:
        if self._logins is None:
            return RedirectResponse(request.scope.get("root_path", "") + "/", 303)
        if request.method != "POST":
            return self._rendered(request, "login", {"wrong": False})
        try:
            fields = await read_form(request)
        except Refused as error:
            return PlainTextResponse(error.text + "\n", error.status)
        cookie = self._logins.begin(fields.get("token", "").strip())
        if cookie is None:
            log.warning("a token that is not known was given at %s", request.url.path)
            return self._rendered(request, "login", {"wrong": True}, 401)
        response = RedirectResponse(request.scope.get("root_path", "") + "/", 303)
        set_cookie(request, response, LOGIN, cookie, SESSION_S)
        return response

    async def _logout(self, request: Request) -> Response:
        if self._logins is not None:
            self._logins.end(request)
        response = RedirectResponse(request.scope.get("root_path", "") + "/login", 303)
        response.delete_cookie(LOGIN, path=request.scope.get("root_path", "") or "/", httponly=True, samesite="strict")
        return response

    async def _missing(self, request: Request) -> Response:
        return self._failed(request, Refused(404, "There is no such page."))


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return PlainTextResponse("There is no such file.\n", 404)
    # Their addresses have a digest of what they hold.
    return FileResponse(
        STATIC / name,
        media_type=TYPES[name.rpartition(".")[2]],
        headers={"cache-control": "public, max-age=31536000, immutable"},
    )
