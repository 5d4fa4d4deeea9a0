"""What is read of a fleet and drawn; parts themselves need a fleet and minutes."""

import json
from typing import Any

from loadtest.cluster.__main__ import main
from loadtest.cluster.parts import PARTS
from loadtest.cluster.show import draw, render
from loadtest.cluster.watch import count_begun, read_series
from loadtest.compare.deployment import Deployment
from loadtest.environment import REPO

PAGE = """\
# TYPE ray_serve_autoscaling_target_replicas gauge
ray_serve_autoscaling_target_replicas{deployment="TetrisEngine:demo"} 2.0
ray_serve_autoscaling_target_replicas{deployment="TetrisFront"} 1.0
# TYPE ray_tetris_unplaced_requests gauge
ray_tetris_unplaced_requests{deployment="TetrisFront",replica="f"} 3.0
ray_tetris_unplaced_requests{deployment="TetrisFront",replica="g"} 2.0
# TYPE ray_tetris_forecast_requests gauge
ray_tetris_forecast_requests 12.5
# TYPE ray_tetris_begun_requests counter
ray_tetris_begun_requests_total{deployment="TetrisEngine:m",replica="a"} 7.0
"""


class Page:
    """An endpoint that has this page alone."""

    def fetch(self, page: str) -> str:
        return PAGE


def deployment() -> Any:
    return Deployment(Page(), ("http://metrics",))


def test_engines_are_told_from_fronts_which_add_up():
    expected = {"wanted": 2.0, "waiting": 5.0, "forecast": 12.5}
    assert read_series(deployment()) == expected
    assert count_begun(deployment()) == {"a": 7.0}


def test_timelines_are_drawn_and_parts_without_one_are_not(tmp_path):
    point = {"at_s": 1.0, "wanted": 1.0, "running": 1.0, "in_flight": 3}
    one = {"config": "c", "machine": {"cpu": "a", "cores": 2}, "timeline": [point] * 2}
    draw({"keys": {}}, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    draw({"idle": one, "keys": {}}, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_committed_is_what_was_measured():
    folder = REPO / "loadtest" / "results" / "cluster-cpu"
    results = json.loads((folder / "results.json").read_text())
    assert set(results) == set(PARTS)
    real = json.loads((folder / "smollm2" / "results.json").read_text())
    assert (folder / "results.md").read_text() == render(results)
    assert (folder / "smollm2" / "results.md").read_text() == render(real)
    # Whose client was ended with the run is no failure of the server's.
    for name in ("scale", "idle"):
        assert set(results[name]["failures"]) <= {"unfinished"}
    # The same rate needs more replicas where less is accepted.
    wanted = results["mix"]["wanted"]
    assert wanted["2"] > 1.5 * wanted["0"]


def test_a_config_that_is_not_there_is_an_error_that_names_it(tmp_path, capsys):
    words = ["--output", str(tmp_path), "--config", "nowhere.yaml", "--parts", "idle"]
    assert main(words) == 2
    assert "nowhere.yaml" in capsys.readouterr().out
