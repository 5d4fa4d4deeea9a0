"""The README's pictures, taken by the tests that look at the same things.

`TETRIS_PICTURES=loadtest/results/screenshots` keeps them there. README's chat is
with the server that `make serve` starts: `python -m tests.pictures URL`.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from playwright.sync_api import Page, expect, sync_playwright

SCREENSHOTS = Path(__file__).parent.parent / "loadtest" / "results" / "screenshots"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_COLUMNS = 3
_PANEL_INCHES = (5.2, 3.0)


def picture_path(name: str, otherwise: Path) -> Path:
    folder = Path(os.environ.get("TETRIS_PICTURES") or otherwise)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name


@contextmanager
def open_browser() -> Iterator[Page]:
    """Open a tab of the machine's own Chromium; without one the test is skipped."""
    executable = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if executable is None:
        pytest.skip("no Chromium on this machine: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox"]
        )
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 760})
        finally:
            browser.close()


def draw_dashboard(
    file: Path, query: Callable[..., list[Any]], minutes: float, path: Path
) -> None:
    """Draw what a Grafana dashboard would show, where no Grafana is at hand.

    Args:
        file: Grafana's JSON.
        query: Of Prometheus; takes an expression, and start, end and step in seconds.
        minutes: How far back the queries reach.
        path: The picture.
    """
    dashboard = json.loads(file.read_text("utf-8"))
    panels = [panel for panel in dashboard["panels"] if panel.get("targets")]
    lines = math.ceil(len(panels) / _COLUMNS)
    size = (_PANEL_INCHES[0] * _COLUMNS, _PANEL_INCHES[1] * lines)
    figure = Figure(figsize=size, dpi=80)
    axes = list(figure.subplots(lines, _COLUMNS, squeeze=False).flat)
    end_s = time.time()
    times = {"start": end_s - 60 * minutes, "end": end_s, "step": minutes}
    for axis, panel in zip(axes, panels, strict=False):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axis.set_title(f"{panel['title']} ({unit})", fontsize=9)
        for target in panel["targets"]:
            for series in query(target["expr"], **times):
                points = pd.DataFrame(series["values"], dtype=float)
                label = target.get("legendFormat", "")
                for name, value in series["metric"].items():
                    label = label.replace(f"{{{{{name}}}}}", value)
                axis.plot((points[0] - end_s) / 60, points[1], label=label)
        # A line that hardly changes would lie on the frame.
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
        axis.set_xlabel("minutes", fontsize=8)
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize=7, loc="upper left")
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    figure.suptitle(f"{dashboard['title']}: the panels' queries")
    figure.tight_layout(rect=(0, 0, 1, 0.98))
    figure.savefig(path)


def take_chat(url: str) -> None:
    """Ask a running server two questions, and keep what its chat page shows."""
    with open_browser() as page:
        page.goto(url)
        for question in (
            "What is the capital of France?",
            "Name three things to see there, in a list.",
        ):
            page.locator("#text").fill(question)
            page.locator("#send").click()
            expect(page.locator("#send")).to_have_text("Stop")
            expect(page.locator("#send")).to_have_text("Send", timeout=120_000)
        page.screenshot(path=picture_path("chat.png", SCREENSHOTS))


if __name__ == "__main__":
    take_chat(sys.argv[1])
