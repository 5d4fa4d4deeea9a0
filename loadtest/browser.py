"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx
from websockets.sync.client import ClientConnection, connect

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_START_TIMEOUT_S = 30.0
_MAX_MESSAGE_BYTES = 64 << 20
_KEY_CODES = {"Enter": 13, "Escape": 27}


def find_chromium() -> str | None:
    """Return the path of an installed Chromium or Chrome, or None."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab."""

    def __init__(self, connection: ClientConnection) -> None:
        """Take over the tab at the other end of a DevTools connection."""
        self._connection = connection
        self._numbers = itertools.count(1)

    def open(self, url: str) -> Self:
        """Go to an address."""
        self._send("Page.navigate", url=url)
        return self

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression.

        Raises:
            RuntimeError: The expression threw.
        """
        answer = self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0) -> Any:
        """Wait until an expression is true, and return its value.

        Raises:
            TimeoutError: It never was.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{expression} was not true within {timeout_s:g} s")
            time.sleep(0.1)
        return value

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press and release a key that writes nothing, by its DOM name."""
        code = _KEY_CODES[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                **(text if kind == "keyDown" else {}),
            )

    @contextmanager
    def sized(self, width: int, height: int) -> Iterator[None]:
        """Show pages as a phone with so many CSS pixels would."""
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=True,
        )
        try:
            yield
        finally:
            self._send("Emulation.clearDeviceMetricsOverride")

    def screenshot(self, path: Path) -> None:
        """Write what the tab shows as PNG."""
        answer = self._send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv())
            if answer.get("id") == number:
                break
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result


@contextmanager
def open_page(executable: str, width: int = 1280, height: int = 800) -> Iterator[Page]:
    """Start a browser with one empty tab, and end it afterwards.

    Args:
        executable: What `find_chromium` found.
        width: Of the window, in pixels.
        height: Of the window, in pixels.

    Yields:
        The tab.

    Raises:
        RuntimeError: The browser did not start.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                executable,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--hide-scrollbars",
                "--remote-debugging-port=0",
                f"--window-size={width},{height}",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = _find_tab(_read_port(process, Path(profile)))
            with connect(url, max_size=_MAX_MESSAGE_BYTES, proxy=None) as connection:
                yield Page(connection)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_port(process: subprocess.Popen[bytes], profile: Path) -> int:
    file = profile / "DevToolsActivePort"
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not (file.exists() and "\n" in file.read_text()):
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError("the browser did not start")
        time.sleep(0.1)
    return int(file.read_text().split("\n", 1)[0])


def _find_tab(port: int) -> str:
    tabs = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False).json()
    return str(
        next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
    )
