"""Server-sent events out of arbitrary pieces of a byte stream."""

from collections.abc import Iterator
from typing import NamedTuple


class ServerSentEvent(NamedTuple):
    """One event: its data lines, joined by newlines, and its type if one was given."""

    data: str
    event: str = ""


class SseDecoder:
    """Cuts a byte stream into events, wherever the pieces of the stream end.

    A piece may end within a line, within a UTF-8 character or between a carriage return
    and its line feed, and may hold several events. Comments (servers send them as
    pings) and fields other than `data` and `event` are skipped. An event that is not
    followed by an empty line when the stream ends is incomplete and never comes out.

    Source: WHATWG HTML, section 9.2.6 (lines that end in a lone carriage return,
    which no known server sends, are the one part left out).
    """

    def __init__(self) -> None:
        """Begin at the start of a stream."""
        self._rest, self._event = b"", ""
        self._data: list[str] = []

    @property
    def is_between_events(self) -> bool:
        """Whether everything fed so far has come out."""
        return not (self._rest or self._data)

    def feed(self, piece: bytes) -> Iterator[ServerSentEvent]:
        """Yield the events that the next piece of the stream completes, oldest first.

        Raises:
            UnicodeDecodeError: If a complete line is not UTF-8.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            name, _, value = line.removesuffix(b"\r").decode().partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
            elif name == "event":
                self._event = value
            elif line in (b"", b"\r"):
                event = ServerSentEvent("\n".join(self._data), self._event)
                has_data, self._data, self._event = bool(self._data), [], ""
                if has_data:
                    yield event
