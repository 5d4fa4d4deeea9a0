"""More columns for Locust's web page, and a page of live charts at /tokens.

The page's Start is answered when the run has been prepared, so that what cannot work is
said there. Locust itself would say that it has started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gevent
from flask import Blueprint, Response, request

from .live import COLUMNS
from .locust_run import LocustRun

_PAGE = Path(__file__).with_name("web_page.html")
_TABLE_KEY = "tokens"
_SAMPLE_PERIOD_S = 2.0
_MAX_WAIT_S = 30.0
"""For a run to be prepared; a large workload may take longer."""


def extend_web_ui(web_ui: Any, run: LocustRun) -> None:
    """Add a tab with our columns to Locust's page, and the page /tokens.

    Args:
        web_ui: Locust's web UI.
        run: Source of the figures.
    """
    runner = web_ui.environment.runner
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
            "history": list(run.live.history),
            "error": run.failure,
            "client": samples,
            "ttft_target_ms": run.live.ttft_target_ms,
            "tpot_target_ms": run.live.tpot_target_ms,
        }
        return _answer(answer)

    @web_ui.app.before_request
    def refuse_second_start() -> Response | None:
        if request.endpoint != "locust.swarm":
            return None
        if runner.shape_greenlet or not run.has_ended:
            message = "the last run has not ended yet; stop it first, or wait"
            return _answer({"success": False, "message": message})
        run.is_prepared.clear()
        return None

    @web_ui.app.after_request
    def say_why_not_started(response: Response) -> Response:
        if request.endpoint == "locust.swarm" and response.is_json:
            answer = response.json or {}
            if answer.get("success"):
                run.is_prepared.wait(_MAX_WAIT_S)
                if run.failure:
                    answer |= {"success": False, "message": run.failure}
                    response.set_data(json.dumps(answer))
        return response

    @web_ui.app.after_request
    def add_rows(response: Response) -> Response:
        if request.endpoint == "locust.request_stats" and response.is_json:
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
    gevent.spawn(_record, run)


def _answer(values: dict[str, Any]) -> Response:
    return Response(json.dumps(values), mimetype="application/json")


def _record(run: LocustRun) -> None:
    while True:
        gevent.sleep(_SAMPLE_PERIOD_S)
        run.live.record(run.now_s)
