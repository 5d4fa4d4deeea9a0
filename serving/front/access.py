"""Who may call: a key for each caller, and what it opens."""

from __future__ import annotations

import base64
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers, MutableHeaders

from serving.front.caller import Caller, caller
from serving.front.errors import ApiError
from serving.front.key_ring import KeyRing
from serving.front.metrics import RateMetrics
from serving.front.rate_limits import RateLimits

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from serving.settings.key_file import KeyEntry
    from serving.settings.key_file import Scope as KeyScope

_OPEN: Final = ("/health",)
_CHAT: Final = (
    "/",
    "/tokenize",
    "/detokenize",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
    "/openapi.json",
)
_LORA: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""vLLM's, which change what is served; not for who may only chat."""
_PAGES: Final = ("/", "/board", "/board/events", "/docs", "/redoc", "/openapi.json")
"""What browsers open: they ask for the key as a password, and send it from then on."""


@dataclass(frozen=True)
class AccessOptions:
    """How a front is to treat callers.

    Attributes:
        keys_file: The file of keys.
        redis_url: Where fronts count together, or None.
        classes: Of the deployment, which keys may name.
    """

    keys_file: str
    redis_url: str | None
    classes: Collection[str]


def scope_of(path: str) -> KeyScope | None:
    """Return what a key must have for a path, None for nothing.

    A route that is not named here needs `admin`, so that a new one begins closed.
    """
    if path in _OPEN:
        return None
    if path in _CHAT or (path.startswith("/v1/") and path not in _LORA):
        return "chat"
    return "metrics" if path in {"/board", "/board/events"} else "admin"


class AccessMiddleware:
    """Refuses who has no key for a route, or has used up what it may."""

    def __init__(self, app: ASGIApp, options: AccessOptions) -> None:
        """Read the keys; made in the front's process, when its application starts.

        Raises:
            OSError: There is no file of keys.
            ValueError: It is broken.
        """
        self._app = app
        self._keys = KeyRing(options.keys_file, options.classes)
        self._limits = RateLimits(
            options.redis_url, note_alone=RateMetrics().count_alone
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = _path_of(scope)
        needed = scope_of(path) if scope["type"] == "http" else None
        if needed is None:
            await self._app(scope, receive, send)
            return
        name, entry = self._identify(Headers(scope=scope), path)
        if needed not in entry.scopes:
            raise ApiError(403, f"The key {name} lacks the scope {needed}.")
        if needed != "chat" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = await self._limits.begin(name, entry)

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers)
            await send(message)

        token = caller.set(self._caller(name, entry))
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            caller.reset(token)
            self._limits.end(name)

    def _identify(self, headers: Headers, path: str) -> tuple[str, KeyEntry]:
        is_page = path in _PAGES
        key = _read_key(headers)
        found = None if key is None else self._keys.find(key)
        if found is not None:
            return found
        error = ApiError(
            401,
            "No API key was given: send it as `Authorization: Bearer KEY`."
            if key is None
            else "The API key is wrong.",
        )
        kind = "Basic" if is_page else "Bearer"
        error.headers = {"WWW-Authenticate": f'{kind} realm="tetris-serve"'}
        raise error

    def _caller(self, name: str, entry: KeyEntry) -> Caller:
        return Caller(
            name,
            entry.request_class,
            functools.partial(self._limits.charge, name, entry),
            functools.partial(setattr, self._limits, "num_fronts"),
        )


def _path_of(scope: Scope) -> str:
    """Return the path below the application's route prefix."""
    path: str = scope.get("path", "/")
    return path.removeprefix(scope.get("root_path", "")) or "/"


def _read_key(headers: Headers) -> str | None:
    kind, _, value = headers.get("authorization", "").strip().partition(" ")
    if kind.lower() == "bearer":
        return value.strip() or None
    # Browsers add this by themselves, so other sites' pages must not make them.
    from_elsewhere = headers.get("sec-fetch-site") in {"cross-site", "same-site"}
    if kind.lower() != "basic" or from_elsewhere:
        return None
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
    except ValueError:  # No base64, or of no text.
        return None
