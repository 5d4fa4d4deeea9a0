"""Timelines of replicas and requests, on one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.page import to_png

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TITLES: Final = {
    "scale": "a load swells and ebbs",
    "idle": "nobody, somebody, nobody",
    "mix": "the same rate, few drafts fit from half-time on",
}
_REQUESTS: Final = ("in_flight", "waiting", "forecast")
_REPLICAS: Final = ("wanted", "running")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw what has a timeline: requests above, replicas below."""
    parts = [name for name in _TITLES if "timeline" in results.get(name, {})]
    if not parts:
        return
    figure = Figure(figsize=(5.5 * len(parts), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(parts), squeeze=False, sharex="col")
    for column, name in enumerate(parts):
        points = results[name]["timeline"]
        for row, series in enumerate((_REQUESTS, _REPLICAS)):
            panel = panels[row][column]
            for key in series:
                shown = [(p["at_s"], p[key]) for p in points if key in p]
                if shown:
                    style = "steps-post" if row else "default"
                    label = key.replace("_", " ")
                    panel.plot(*zip(*shown, strict=True), label=label, drawstyle=style)
            panel.grid(alpha=0.25)
            panel.set_ylabel("replicas" if row else "requests")
            panel.legend(fontsize=7)
        panels[0][column].set_title(_TITLES[name], fontsize=9)
        panels[1][column].set_xlabel("s")
    one = results[parts[0]]
    caption = (
        f"{one['config']}, {one['machine']['cpu']}, {one['machine']['cores']} cores"
    )
    path.write_bytes(to_png(figure, caption))
