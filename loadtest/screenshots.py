"""Takes the pictures in the README: ``python -m loadtest.screenshots --help``.

Needs a running deployment with requests on it, and Chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from pathlib import Path

import httpx

from .browser import find_chromium, open_page
from .demo_pair.tasks import TASKS
from .demo_pair.tasks.base import draw

_OUTPUT = Path(__file__).parent / "results" / "screenshots"
_NUM_CLIENTS = 8
_BUSY_BOARD = (
    "document.querySelectorAll('.column').length >= 6 &&"
    " document.querySelectorAll('.column .accepted').length > 40"
)


def main() -> int:
    """Take the pictures; returns the exit code."""
    options = _parse()
    executable = find_chromium()
    if executable is None:
        sys.stderr.write("error: no Chromium; install the package chromium\n")
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    clients = [
        threading.Thread(target=_ask, args=(options.url, number, stop))
        for number in range(_NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    try:
        _take_board(executable, options.url, options.output / "board.png")
        if options.dashboard_token_file:
            _take_dashboard(
                executable,
                options.dashboard_url,
                options.dashboard_token_file.read_text().strip(),
                options.output / "ray-serve.png",
            )
    finally:
        stop.set()
        for client in clients:
            client.join()
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.screenshots", description="Take the README's pictures."
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="endpoint (default: %(default)s)"
    )
    parser.add_argument(
        "--dashboard-url",
        default="http://127.0.0.1:8265",
        help="Ray dashboard (default: %(default)s)",
    )
    parser.add_argument(
        "--dashboard-token-file",
        type=Path,
        help="file with the dashboard's token; without it the dashboard is left out",
    )
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, help="folder (default: %(default)s)"
    )
    return parser.parse_args()


def _take_board(executable: str, url: str, path: Path) -> None:
    with open_page(executable, height=760) as page:
        page.open(f"{url}/board")
        page.wait_for(_BUSY_BOARD, 60)
        page.screenshot(path)
    sys.stdout.write(f"{path}\n")


def _take_dashboard(executable: str, url: str, token: str, path: Path) -> None:
    with open_page(executable, height=900) as page:
        page.open(url)
        page.wait_for("document.readyState === 'complete'")
        cookie = json.dumps(f"ray-authentication-token={token}; path=/")
        page.evaluate(f"document.cookie = {cookie}")
        page.open(f"{url}/#/serve")
        page.evaluate("location.reload()")
        page.wait_for("(document.body?.innerText ?? '').includes('TetrisServer')", 60)
        time.sleep(2)
        page.screenshot(path)
    sys.stdout.write(f"{path}\n")


def _ask(url: str, number: int, stop: threading.Event) -> None:
    """Keep one request running."""
    rng = random.Random(number)
    tasks = [task for task in TASKS.values() if not task.name.startswith("tool_")]
    while not stop.is_set():
        prompt = draw(rng.choice(tasks), rng).prompt
        httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 200,
                "temperature": 0.7,
            },
            timeout=60,
            trust_env=False,
        ).raise_for_status()


if __name__ == "__main__":
    sys.exit(main())
