"""What was seen of a fleet: words and numbers, and timelines on one page."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.page import make_environment, to_png

from .parts import PARTS

_TITLES: Final = {
    "scale": "a load swells and ebbs",
    "idle": "nobody, somebody, nobody",
    "mix": "the same rate, few drafts fit from half-time on",
}
_SHOWN: Final = {
    "requests": ("default", ("in_flight", "waiting", "forecast")),
    "replicas": ("steps-post", ("wanted", "running")),
}


def render(results: Mapping[str, Any]) -> str:
    """Render `results.md`: a sentence or two for each part that was played."""
    environment = make_environment(Path(__file__).parent)
    environment.filters["follow"] = _follow
    template = environment.get_template("results.md.jinja")
    return template.render(results={k: results[k] for k in PARTS if k in results})


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw what has a timeline: requests above, replicas below."""
    parts = [name for name in _TITLES if "timeline" in results.get(name, {})]
    if not parts:
        return
    figure = Figure(figsize=(5.5 * len(parts), 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(parts), squeeze=False, sharex="col")
    for column, name in enumerate(parts):
        points = pd.DataFrame(results[name]["timeline"]).set_index("at_s")
        for panel, (unit, (style, series)) in zip(
            panels[:, column], _SHOWN.items(), strict=True
        ):
            for key in points.columns.intersection(series, sort=False):
                known = points[key].dropna()
                label = key.replace("_", " ")
                panel.plot(known.index, known, label=label, drawstyle=style)
            panel.grid(alpha=0.25)
            panel.set_ylabel(unit)
            panel.legend(fontsize=7)
        panels[0][column].set_title(_TITLES[name], fontsize=9)
        panels[1][column].set_xlabel("s")
    one = results[parts[0]]
    caption = (
        f"{one['config']}, {one['machine']['cpu']}, {one['machine']['cores']} cores"
    )
    path.write_bytes(to_png(figure, caption))


def _follow(timeline: Sequence[Mapping[str, float]]) -> str:
    """Return the numbers of running replicas, one after the other."""
    running = (point["running"] for point in timeline if "running" in point)
    return " → ".join(f"{number:.0f}" for number, _ in groupby(running))
