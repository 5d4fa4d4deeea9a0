"""A tab with goodput and tokens on Locust's web page."""

from __future__ import annotations

import json
from typing import Any

from flask import Response, request

_KEY = "tokens"
_TIMES = [(kind, p) for p in (50, 95) for kind in ("TTFT", "ITL", "TPOT")]
_TITLES = {
    "name": "Workload",
    "requests_per_s": "Requests/s",
    "goodput_per_s": "Goodput/s",
    "tokens_in_per_s": "Tokens in/s",
    "tokens_out_per_s": "Tokens out/s",
    **{f"{kind.lower()}_p{p}_ms": f"{kind} p{p} ms" for kind, p in _TIMES},
    "failed": "Failed",
    "cut": "Cut streams",
}


def extend_web_ui(web_ui: Any) -> None:
    """Add the tab to Locust's web UI."""
    stats = web_ui.environment.runner.stats

    @web_ui.app.after_request
    def extend_answer(response: Response) -> Response:
        if request.endpoint == "locust.request_stats" and response.is_json:
            table = {"key": _KEY, "data": _make_rows(stats)}
            answer = response.get_json() | {"extended_stats": [table]}
            response.set_data(json.dumps(answer))
        return response

    # Locust keeps these when it renews its own.
    columns = [{"key": key, "title": title} for key, title in _TITLES.items()]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": _KEY}],
        "extended_tables": [{"key": _KEY, "title": "Tokens", "structure": columns}],
    }


def _make_rows(stats: Any) -> list[dict[str, Any]]:
    """Return a row for each workload: rates of the latest seconds, latencies of all."""
    rows = []
    for name in sorted({entry.name for entry in stats.entries.values()}):
        chats, ttfts = stats.get(name, "CHAT"), stats.get(name, "TTFT")
        times = {
            f"{kind.lower()}_p{p}_ms": round(
                stats.get(name, kind).get_response_time_percentile(p / 100), 1
            )
            for kind, p in _TIMES
        }
        row = times | {
            "name": name,
            "requests_per_s": round(chats.current_rps, 2),
            "goodput_per_s": round(stats.get(name, "GOOD").current_rps, 2),
            "tokens_in_per_s": round(ttfts.current_rps * ttfts.avg_content_length, 1),
            "tokens_out_per_s": round(chats.current_rps * chats.avg_content_length, 1),
            "failed": chats.num_failures,
            "cut": stats.get(name, "CUT").num_requests,
        }
        rows.append(row)
    return rows
