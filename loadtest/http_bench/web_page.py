"""More columns for Locust's web page, and a page of live charts at /tokens."""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

import gevent
from flask import Blueprint, Response, request

from .live import COLUMNS
from .locust_run import LocustRun

_PAGE = Path(__file__).with_name("web_page.html")
_TABLE_KEY = "tokens"
_SAMPLE_PERIOD_S = 2.0
_MAX_POINTS = 1800


def extend_web_ui(web_ui: Any, run: LocustRun) -> None:
    """Add a tab with our columns to Locust's page, and the page /tokens.

    Args:
        web_ui: Locust's web UI.
        run: Source of the figures.
    """
    history: deque[dict[str, Any]] = deque(maxlen=_MAX_POINTS)
    pages = Blueprint("tokens", __name__)

    @pages.route("/tokens")
    def page() -> Response:
        return Response(_PAGE.read_text(encoding="utf-8"), mimetype="text/html")

    @pages.route("/tokens/figures")
    def figures() -> Response:
        samples = [sample.as_dict() for sample in list(run.client_samples)[-5:]]
        answer = {
            "columns": COLUMNS,
            "rows": run.live.rows(run.now_s),
            "failures": dict(run.live.failures),
            "history": list(history),
            "client": samples,
            "ttft_target_ms": run.live.ttft_target_ms,
            "tpot_target_ms": run.live.tpot_target_ms,
        }
        return Response(json.dumps(answer), mimetype="application/json")

    @web_ui.app.after_request
    def add_rows(response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json:
            table = {"key": _TABLE_KEY, "data": run.live.rows(run.now_s)}
            response.set_data(
                json.dumps({**(response.json or {}), "extended_stats": [table]})
            )
        return response

    web_ui.app.register_blueprint(pages)
    # Locust keeps these when it renews its own.
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": _TABLE_KEY}],
        "extended_tables": [
            {
                "key": _TABLE_KEY,
                "title": "Tokens",
                "structure": [{"key": key, "title": title} for key, title in COLUMNS],
            }
        ],
    }
    gevent.spawn(_record, run, history)


def _record(run: LocustRun, history: deque[dict[str, Any]]) -> None:
    while True:
        gevent.sleep(_SAMPLE_PERIOD_S)
        now_s = run.now_s
        if now_s > 0:
            history.append({"at_s": round(now_s, 1), **run.live.rows(now_s)[-1]})
        elif history and run.live.num_finished == 0:
            history.clear()
