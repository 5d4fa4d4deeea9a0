"""A tab with goodput and tokens on Locust's web page.

The page's Start is answered when the run has been prepared, so that what cannot work is
said there. Locust itself would say that it has started.
"""

from __future__ import annotations

import json
from typing import Any

from flask import Response, request

from .run import LocustRun

_KEY = "tokens"
_MAX_WAIT_S = 30.0
"""For a run to be prepared; a large workload may take longer."""

_RATES = {"requests": "CHAT", "goodput": "GOOD"}
_TIMES = ("TTFT", "ITL", "TPOT")
_TITLES = {
    "name": "Workload",
    **{f"{name}_per_s": f"{name.title()}/s" for name in _RATES},
    "tokens_in_per_s": "Tokens in/s",
    "tokens_out_per_s": "Tokens out/s",
    **{f"{kind.lower()}_p50_ms": f"{kind} p50 ms" for kind in _TIMES},
    **{f"{kind.lower()}_p95_ms": f"{kind} p95 ms" for kind in _TIMES},
    "failed": "Failed",
    "cut": "Cut streams",
    "client_cpu": "Client's CPU, cores",
    "client_lag_ms": "Client late, ms",
}


def extend_web_ui(web_ui: Any, run: LocustRun) -> None:
    """Add the tab, and have Start wait for the run.

    Args:
        web_ui: Locust's web UI.
        run: What its Start begins.
    """
    runner = web_ui.environment.runner

    @web_ui.app.before_request
    def refuse_second_start() -> dict[str, Any] | None:
        if request.endpoint != "locust.swarm":
            return None
        if runner.shape_greenlet or not run.has_ended:
            message = "the last run has not ended yet; stop it first, or wait"
            return {"success": False, "message": message}
        run.is_prepared.clear()
        return None

    @web_ui.app.after_request
    def extend_answer(response: Response) -> Response:
        answer = response.json if response.is_json else None
        if request.endpoint == "locust.request_stats" and answer:
            table = {"key": _KEY, "data": _make_rows(runner.stats, run)}
            response.set_data(json.dumps(answer | {"extended_stats": [table]}))
        elif request.endpoint == "locust.swarm" and answer and answer["success"]:
            run.is_prepared.wait(_MAX_WAIT_S)
            if run.failure:
                refusal = {"success": False, "message": run.failure}
                response.set_data(json.dumps(answer | refusal))
        return response

    # Locust keeps these when it renews its own.
    columns = [{"key": key, "title": title} for key, title in _TITLES.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": _KEY}],
        "extended_tables": [{"key": _KEY, "title": "Tokens", "structure": columns}],
    }


def _make_rows(stats: Any, run: LocustRun) -> list[dict[str, Any]]:
    """Return a row for each workload: rates of the latest seconds, latencies of all."""
    rows = []
    for name in sorted({entry.name for entry in stats.entries.values()}):
        chats, ttfts = stats.get(name, "CHAT"), stats.get(name, "TTFT")
        row = {"name": name, "failed": chats.num_failures}
        row["cut"] = stats.get(name, "CUT").num_requests
        for rate, method in _RATES.items():
            row[f"{rate}_per_s"] = round(stats.get(name, method).current_rps, 2)
        for way, entry in (("in", ttfts), ("out", chats)):
            tokens_per_s = entry.current_rps * entry.avg_content_length
            row[f"tokens_{way}_per_s"] = round(tokens_per_s, 1)
        for kind in _TIMES:
            entry = stats.get(name, kind)
            for percent in (50, 95):
                value = entry.get_response_time_percentile(percent / 100)
                row[f"{kind.lower()}_p{percent}_ms"] = round(value, 1)
        for key, seen in (("client_cpu", "cpu"), ("client_lag_ms", "lag_p99_ms")):
            values = [sample[seen] for sample in run.client.values()]
            row[key] = round(max(values), 2) if values else None
        rows.append(row)
    return rows
