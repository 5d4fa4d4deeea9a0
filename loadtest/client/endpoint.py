"""An endpoint's pages beside its streams: models, health, metrics."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import httpx

from loadtest.errors import LoadTestError

_TIMEOUT_S = 5.0
_MODELS_TIMEOUT_S = 30.0
_NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)
_NO_SENSE = (ValueError, KeyError, IndexError, TypeError)


@functools.cache
def _client() -> httpx.Client:
    """Return one client for all: each reads the certificates, which takes a while."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(trust_env=False, limits=limits)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server answers.

    Attributes:
        url: Its root, without `/v1`.
        headers: Of every request, e.g. an API key; they go nowhere else.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)

    def get(self, page: str, timeout_s: float = _TIMEOUT_S) -> httpx.Response:
        """Get a path of the endpoint, or a whole address beside it."""
        if not page.startswith(("http://", "https://")):
            page = f"{self.url}{page}"
        headers = dict(self.headers) if page.startswith(f"{self.url}/") else {}
        return _client().get(page, headers=headers, timeout=timeout_s)

    def fetch(
        self, page: str, on_problem: Callable[[str], None] = lambda _: None
    ) -> str | None:
        """Return the text of a page; None if there is none, and tell why."""
        try:
            return self.get(page).raise_for_status().text
        except _NO_ANSWER as error:
            on_problem(f"{page}: {error}")
            return None

    def why_silent(self) -> str | None:
        """Return why it does not list its models; None if it does."""
        try:
            answer = self.get("/v1/models")
            if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise LoadTestError(
                    f"{answer.url}: {answer.status_code} {answer.reason_phrase}; give "
                    "its key with --header 'Authorization: Bearer ...'"
                )
            answer.raise_for_status()
        except _NO_ANSWER as error:
            return str(error)
        return None

    def find_model(self) -> str:
        """Return the first model that it lists; an error if there is none."""
        try:
            answer = self.get("/v1/models", _MODELS_TIMEOUT_S).raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (*_NO_ANSWER, *_NO_SENSE) as error:
            raise LoadTestError(
                f"{self.url}/v1/models names no model ({error}); start the server, or "
                "give --model"
            ) from None

    def count_replicas(self) -> float | None:
        """Return the running replicas by its `/health`; None if it tells none.

        Status 503 says 0, whoever sends it: other servers do so too when they are ill.
        """
        try:
            answer = self.get("/health")
            if answer.status_code == HTTPStatus.SERVICE_UNAVAILABLE:
                return 0.0
            return float(answer.raise_for_status().json()["running_replicas"])
        except (*_NO_ANSWER, *_NO_SENSE):
            return None
