"""A page of ours on a web server of its own, with fakes of what it calls."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from starlette.responses import HTMLResponse

from serving.front.board import PAGE_HEADERS, read_page
from tests.serving.conftest import find_free_ports, wait_until


def page_route(name: str) -> HTMLResponse:
    """Answer with a page as a front does."""
    return HTMLResponse(read_page(name), headers=PAGE_HEADERS)


@contextmanager
def run_site(app: FastAPI) -> Iterator[str]:
    """Serve until the block ends; gives the address, without a slash at its end."""
    (port,) = find_free_ports(1)
    config = uvicorn.Config(
        app, port=port, log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, 30, period_s=0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
