"""Routes that are the same whoever answers requests: health, board, chat page."""

from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    Response,
    StreamingResponse,
)

from serving.front.board import (
    PAGE_HEADERS,
    STREAM_HEADERS,
    BoardFeed,
    TooManyWatchersError,
    read_page,
)
from serving.front.errors import ApiError
from serving.front.replica_count import ReplicaCount


class PageRoutes:
    """Mixin for the deployment that is mounted on the web application."""

    _replicas: ReplicaCount
    _feed: BoardFeed

    async def health(self) -> Response:
        """Answer 200 while at least one engine replica runs, 503 otherwise."""
        return JSONResponse(await self._replicas.describe())

    async def chat_page(self) -> Response:
        """Show a chat, with what the engines do for it beside it."""
        return HTMLResponse(read_page("chat"), headers=PAGE_HEADERS)

    async def board(self) -> Response:
        """Show the live board."""
        return HTMLResponse(read_page("board"), headers=PAGE_HEADERS)

    async def board_events(self) -> Response:
        """Stream what the live board shows."""
        try:
            events = self._feed.watch()
        except TooManyWatchersError as error:
            raise ApiError(503, f"{error}; retry later.") from None
        return StreamingResponse(
            events, media_type="text/event-stream", headers=STREAM_HEADERS
        )
