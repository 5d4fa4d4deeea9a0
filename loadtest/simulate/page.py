"""A page with plots of a run: `python -m loadtest.simulate.page RESULT.json PAGE.html`.

`tetris-serve simulate --html` writes the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from cycler import cycler
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loadtest.page import embed, make_environment, to_png

from .output import HEADERS

Point = Mapping[str, Any]
"""One load and age of telemetry, as `describe` gives it."""

_MOST_COLUMNS = 3
_COLOURS = [colormaps["tab10"](number) for number in range(8)]
_DASHES = ["-", "--", ":", "-."] * 2


def render_page(found: Mapping[str, Any]) -> str:
    """Return the page of what `--json` writes.

    It has those plots for which there is something to draw: two loads or ages at
    least, an autoscaler.
    """
    counts = sorted({point["num_requests"] for point in found["points"]})
    seeds = found["seeds"]
    caption = (
        f"engine model {found['engine']['name']}, "
        f"{' or '.join(map(str, counts))} requests, {len(seeds)} seeds ({seeds[0]} to "
        f"{seeds[-1]})"
    )
    template = make_environment(Path(__file__).parent).get_template("page.html.jinja")
    return template.render(
        found=found,
        caption=caption,
        headers=HEADERS,
        title=_title,
        figures=embed(_draw(found, caption)),
    )


def _draw(found: Mapping[str, Any], caption: str) -> Iterator[tuple[str, bytes]]:
    """Yield titles and figures."""
    points = found["points"]
    loads = _vary(points, "rate_per_s", "staleness_s")
    if loads:
        figure, panels = make_panels(len(loads))
        for panel, (age_s, own) in zip(panels, loads, strict=True):
            _draw_metric(panel, own, "rate_per_s", "attainment")
            panel.set(title=f"telemetry {age_s:g} s old", ylim=(0, 1.03))
            panel.set(xlabel="requests/s", ylabel="attainment")
        yield "Attainment against load", to_png(figure, caption)
    ages = _vary(points, "staleness_s", "rate_per_s")
    if ages:
        figure, panels = make_panels(len(ages))
        for panel, (rate_per_s, own) in zip(panels, ages, strict=True):
            panel.set_xscale("symlog", linthresh=0.01)
            _draw_metric(panel, own, "staleness_s", "goodput_per_s")
            panel.set(title=f"{rate_per_s:.4g} requests/s", ylim=(0, None))
            panel.set(xlabel="age of telemetry, s", ylabel="goodput, requests/s")
        yield "Goodput against staleness of telemetry", to_png(figure, caption)
    growing = [point for point in points if point["growth"]]
    if growing:
        figure, panels = make_panels(len(growing))
        for panel, point in zip(panels, growing, strict=True):
            for arm, result in point["arms"].items():
                curves = result["curves"]
                panel.step(curves["time_s"], curves["replicas"], label=arm)
            panel.set(title=_title(point), xlabel="s", ylabel="replicas")
            panel.set_ylim(bottom=0)
        yield "Replicas over time, first seed", to_png(figure, caption)
    for metric in ("ttft", "tpot"):
        figure, panels = make_panels(len(points))
        for panel, point in zip(panels, points, strict=True):
            for arm, result in point["arms"].items():
                panel.plot(result["curves"][f"{metric}_ms"], found["levels"], label=arm)
            panel.axvline(found["targets"][f"{metric}_ms"], color="gray", ls="--")
            panel.set_xscale("log")
            panel.set(title=_title(point), xlabel="ms", ylabel="share of requests")
        title = f"{metric.upper()}: distribution, dashed the target"
        yield title, to_png(figure, caption)


def _title(point: Point) -> str:
    rate_per_s, age_s = point["rate_per_s"], point["staleness_s"]
    return f"{rate_per_s:.4g} requests/s, telemetry {age_s:g} s old"


def _vary(
    points: Sequence[Point], what: str, kept: str
) -> list[tuple[float, list[Point]]]:
    """Return the points of each value of `kept` that has two or more of `what`."""
    ordered = sorted(points, key=itemgetter(kept, what))
    groups = [(value, list(own)) for value, own in groupby(ordered, itemgetter(kept))]
    return [(value, own) for value, own in groups if len(own) > 1]


def _draw_metric(panel: Axes, points: Sequence[Point], x: str, metric: str) -> None:
    """Draw a line for each arm, with intervals where there are any."""
    for arm in points[0]["arms"]:
        found = [point["arms"][arm]["means"][metric] for point in points]
        spread = [
            [0.0 if one[end] is None else abs(one[end] - one["value"]) for one in found]
            for end in ("low", "high")
        ]
        values = [one["value"] for one in found]
        places = [point[x] for point in points]
        panel.errorbar(places, values, spread, label=arm, marker=".", capsize=2)


def make_panels(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its panels in lines of three."""
    columns = min(count, _MOST_COLUMNS)
    lines = -(-count // columns)
    figure = Figure(figsize=(1.6 + 4.6 * columns, 3.6 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel in panels:
        panel.grid(alpha=0.25)
        # Lines of arms that do the same lie on each other.
        panel.set_prop_cycle(cycler(color=_COLOURS, ls=_DASHES))
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def main(arguments: Sequence[str]) -> int:
    """Write the page of a result."""
    if len(arguments) != 2:
        sys.stderr.write(f"{__doc__}")
        return 2
    source, page = map(Path, arguments)
    page.write_text(render_page(json.loads(source.read_text("utf-8"))), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
