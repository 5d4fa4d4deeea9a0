"""Engines without Ray: configured as a replica's are, and refused as they are."""

from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from serving.commands.bench import _run
from serving.engine_args import engine_kwargs_of, replica_env_of
from serving.offline import start_arguments
from serving.settings.model import SettingsError, parse_settings
from tests.serving.test_settings import minimal


def deployment(**engine: Any) -> dict[str, Any]:
    return minimal(policy={"name": "tetris"}, engine={"cpu_threads": 2} | engine)


def test_an_engine_is_started_as_a_replica_starts_it() -> None:
    arguments, env = start_arguments(deployment())
    settings = parse_settings(deployment())

    assert arguments.items() >= engine_kwargs_of(settings).items()
    assert arguments["model"] == "org/target"
    assert env.items() >= replica_env_of(settings).items()
    assert env["OMP_NUM_THREADS"] == "2"
    # They travel to another process.
    assert json.loads(json.dumps(arguments)) == arguments


@pytest.mark.parametrize("setting", [{"max_model_len": 1}, {"adapter": "off"}])
def test_what_cannot_be_served_cannot_be_measured(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=rf"engine\.{next(iter(setting))}"):
        start_arguments(deployment(**setting))


def test_a_benchmark_whose_libraries_are_missing_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = EntryPoint("engine", "no_such_library:main", "tetris_serve.benchmarks")

    assert _run(missing, None) == 1  # type: ignore[arg-type]
    assert "No module named 'no_such_library'" in capsys.readouterr().err
