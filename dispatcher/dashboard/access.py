"""Who asks, and what that user may do: a resolver says so for each request."""

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from starlette.requests import Request

from mailroom.errors import ConfigurationError, MailroomError
from mailroom.schema.audit import check_actor
from mailroom.values.names import shown

Action: TypeAlias = Literal["replay", "retry", "discard", "requeue", "pause", "resume", "cancel"]
ACTIONS: tuple[Action, ...] = get_args(Action)
EVERYTHING: frozenset[Action] = frozenset(ACTIONS)
READ_ONLY: frozenset[Action] = frozenset()

LEAST_TOKEN = 20  # characters: one that is typed can be guessed


@dataclass(frozen=True, slots=True)
class User:
    """Who uses the dashboard: the `name` goes into the audit, and `may` has the actions that are allowed.

    `EVERYTHING` and `READ_ONLY` are such sets; any other set of `ACTIONS` will do. Raises `InvalidMessage` for a name
    that the audit cannot take, and `ConfigurationError` for an action that there is none.
    """

    name: str
    may: Collection[Action] = READ_ONLY

    def __post_init__(self) -> None:
        check_actor(self.name, None)
        if unknown := sorted(set(self.may) - EVERYTHING):
            raise ConfigurationError(
                f"There is no action {shown(unknown[0])}: give some of {', '.join(ACTIONS)}.",
                code="MR-dashboard-access",
            )


# Says who asks, None for an unknown user. It is called for each request, and has to be quick or async.
Resolver: TypeAlias = Callable[[Request], User | Awaitable[User | None] | None]


def rights(text: str) -> frozenset[Action]:
    """Return the actions that a word or a list names: `everything`, `read-only`, or `replay,requeue`."""
    if text in ("everything", "read-only"):
        return EVERYTHING if text == "everything" else READ_ONLY
    names = {each.strip() for each in text.split(",")}
    if unknown := sorted(names - EVERYTHING):
        raise ConfigurationError(
            f"{shown(unknown[0])} is not a right: give everything, read-only, or some of {', '.join(ACTIONS)}, with "
            "commas between them.",
            code="MR-dashboard-access",
        )
    return frozenset(cast("set[Action]", names))


class Tokens:
    """A resolver by tokens: in the header `Authorization: Bearer`, or typed once into the page, which sets a cookie.

    Each line of the file at `path` has a name, what that user may do, and a token of at least 20 characters, with
    blanks between them; a line that begins with # is a comment. It is read once. Raises `ConfigurationError`.
    """

    def __init__(self, path: Path | str) -> None:
        self._users = dict(_lines(Path(path)))

    def __call__(self, request: Request) -> User | None:
        """Return the user of the header's token; the cookie is looked into elsewhere."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return user_of(self, token.strip()) if scheme.lower() == "bearer" and token else None


def user_of(tokens: Tokens, token: str) -> User | None:
    """Return whose token that is. Each is compared, so that the time it takes tells nothing."""
    given, found = token.encode(errors="replace"), None
    for known, user in tokens._users.items():
        if hmac.compare_digest(known.encode(), given):
            found = user
    return found


def named(tokens: Tokens, name: str) -> tuple[str, User] | None:
    """Return the token and the user of this name, whom a cookie of the dashboard's own names."""
    return next(((token, user) for token, user in tokens._users.items() if user.name == name), None)


def _lines(path: Path) -> Iterable[tuple[str, User]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"The file of tokens cannot be read: {error}. Each of its lines is: NAME RIGHTS TOKEN.",
            code="MR-dashboard-access",
        ) from None
    tokens: dict[str, User] = {}
    for number, line in enumerate(lines, 1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 3 or len(parts[2]) < LEAST_TOKEN:
            raise ConfigurationError(
                f"Line {number} of {path} is not NAME RIGHTS TOKEN, with a token of at least {LEAST_TOKEN} characters. "
                "Make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
                code="MR-dashboard-access",
            )
        if parts[2] in tokens or parts[0] in {user.name for user in tokens.values()}:
            raise ConfigurationError(
                f"Line {number} of {path} repeats a name or a token of another line.", code="MR-dashboard-access"
            )
        tokens[parts[2]] = User(parts[0], rights(parts[1]))
    if not tokens:
        raise ConfigurationError(f"{path} has no line NAME RIGHTS TOKEN.", code="MR-dashboard-access")
    return tokens.items()


class ProxyHeader:
    """A resolver by a header that a proxy sets after it has authenticated the user; all of them may do `may`.

    Only what comes from `proxies`, addresses or networks of them, is believed: who reaches the dashboard past the proxy
    could write any name. The proxy has to remove the header from what it is sent.
    """

    def __init__(self, header: str, proxies: Collection[str], may: Collection[Action] = READ_ONLY) -> None:
        try:
            self._proxies = [ipaddress.ip_network(each) for each in proxies]
        except ValueError as error:
            raise ConfigurationError(
                f"That is not a proxy's address: {error}. Give one such as 10.0.0.5, or a network such as 10.0.0.0/24.",
                code="MR-dashboard-access",
            ) from None
        if not self._proxies:
            raise ConfigurationError("Say at which address the proxy is.", code="MR-dashboard-access")
        self._header, self._may = header, frozenset(may)

    def __call__(self, request: Request) -> User | None:
        """Return whom the proxy names."""
        names = request.headers.getlist(self._header)
        if len(names) != 1 or not self._is_proxy(address_of(request)):
            return None
        try:
            return User(names[0], self._may)
        except MailroomError:  # a name that no audit could take
            return None

    def _is_proxy(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
        return address is not None and any(address in each for each in self._proxies)


class Local:
    """A resolver for a dashboard that only this machine reaches: every request is made by `user`."""

    # What a proxy adds. Behind a proxy every client seems to be on this machine.
    FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

    def __init__(self, user: User) -> None:
        self._user = user

    def __call__(self, request: Request) -> User | None:
        """Return the user, if the request comes from this machine."""
        address = address_of(request)
        if address is None or not address.is_loopback or any(name in request.headers for name in self.FORWARDED):
            return None
        return self._user


def address_of(request: Request) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that the request came from, None if the server does not say."""
    try:
        return None if request.client is None else ipaddress.ip_address(request.client.host)
    except ValueError:
        return None
