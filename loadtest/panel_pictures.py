"""Draws what the Grafana dashboards would show: ``python -m loadtest.panel_pictures``.

Runs every panel's queries against a Prometheus and draws their answers, where no
Grafana is at hand. One PNG file per dashboard.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROOT: Final = Path(__file__).resolve().parents[1]
_DASHBOARDS: Final = _ROOT / "helm" / "tetris-serve" / "dashboards"
_OUTPUT: Final = Path(__file__).parent / "results" / "screenshots"
_NUM_COLUMNS: Final = 3
_PANEL_INCHES: Final = (5.2, 3.0)
_NUM_POINTS: Final = 150


class PanelError(Exception):
    """A dashboard cannot be drawn; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """One time series of a panel.

    Attributes:
        label: Its legend.
        times_s: Unix times in seconds.
        values: Values at those times.
    """

    label: str
    times_s: Sequence[float]
    values: Sequence[float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the dashboards; returns the exit code."""
    options = _parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        for file in options.dashboards or sorted(_DASHBOARDS.glob("*.json")):
            path = options.output / f"{file.stem}.png"
            draw_dashboard(file, options.prometheus_url, options.minutes, path)
            sys.stdout.write(f"{path}\n")
    except PanelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def draw_dashboard(file: Path, url: str, minutes: float, path: Path) -> None:
    """Draw every panel of a dashboard.

    Args:
        file: Grafana's JSON.
        url: Of Prometheus.
        minutes: How far back the queries reach.
        path: The picture.

    Raises:
        PanelError: If the file or an answer cannot be read.
    """
    from matplotlib.figure import Figure

    try:
        dashboard = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PanelError(f"{file}: {error}") from None
    panels = [panel for panel in dashboard["panels"] if panel.get("targets")]
    num_rows = math.ceil(len(panels) / _NUM_COLUMNS)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * _NUM_COLUMNS, height * num_rows), dpi=80)
    axes = list(figure.subplots(num_rows, _NUM_COLUMNS, squeeze=False).flat)
    for axis in axes:
        axis.set_axis_off()
    end_s = time.time()
    for axis, panel in zip(axes, panels, strict=False):
        lines = [
            line
            for target in panel["targets"]
            for line in _query(url, target, end_s, minutes)
        ]
        _draw_panel(axis, panel, lines, end_s)
    figure.suptitle(f"{dashboard['title']}: the panels' queries")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path)


def _query(
    url: str, target: Mapping[str, Any], end_s: float, minutes: float
) -> list[Line]:
    expression = target["expr"].replace("$Cluster", ".*")
    try:
        response = httpx.get(
            f"{url}/api/v1/query_range",
            params={
                "query": expression.replace("$__rate_interval", "1m"),
                "start": end_s - 60 * minutes,
                "end": end_s,
                "step": max(60 * minutes / _NUM_POINTS, 1),
            },
            timeout=30,
            trust_env=False,
        )
        answer = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise PanelError(f"--prometheus-url {url}: {error}") from None
    if answer["status"] != "success":
        raise PanelError(f"Prometheus refuses {expression}: {answer['error']}")
    legend = target.get("legendFormat", "")
    return [
        Line(
            _fill_in(legend, series["metric"]),
            [float(at_s) for at_s, _ in series["values"]],
            [float(value) for _, value in series["values"]],
        )
        for series in answer["data"]["result"]
    ]


def _fill_in(legend: str, labels: Mapping[str, str]) -> str:
    """Put a series's labels into Grafana's `{{label}}`."""
    return re.sub(r"{{(.+?)}}", lambda match: labels.get(match[1], ""), legend)


def _draw_panel(
    axis: Axes, panel: Mapping[str, Any], lines: Sequence[Line], end_s: float
) -> None:
    axis.set_axis_on()
    axis.set_title(f"{panel['title']} ({panel['fieldConfig']['defaults']['unit']})")
    for line in lines:
        minutes = [(at_s - end_s) / 60 for at_s in line.times_s]
        axis.plot(minutes, line.values, label=line.label)
    if not lines:
        axis.text(0.5, 0.5, "no data", ha="center", transform=axis.transAxes)
        return
    # A line that hardly changes would lie on the frame.
    axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.set_xlabel("minutes")
    axis.grid(visible=True, alpha=0.3)
    if any(line.label for line in lines):
        axis.legend(fontsize=7, loc="upper left")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.panel_pictures",
        description="Draw what the Grafana dashboards would show, from a Prometheus.",
    )
    parser.add_argument(
        "dashboards",
        nargs="*",
        type=Path,
        metavar="FILE",
        help="Grafana's JSON (default: those of the chart)",
    )
    parser.add_argument(
        "--prometheus-url",
        default="http://127.0.0.1:9090",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--minutes", type=float, default=5, help="how far back (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=_OUTPUT, help="folder (default: %(default)s)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
