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


def deployment(**engine: Any) -> dict[str, Any]:
    return {
        "model": {"id": "m", "target": "org/target", "draft": "org/draft"},
        "policy": {"name": "tetris", "draft_tokens": 2, "max_draft_tokens": 4},
        "engine": {
            "max_model_len": 1024,
            "kv_cache_memory_bytes": "64Mi",
            "cpu_threads": 2,
            **engine,
        },
    }


def test_an_engine_is_started_as_a_replica_starts_it() -> None:
    arguments, env = start_arguments(deployment())
    settings = parse_settings(deployment())

    assert arguments.items() >= engine_kwargs_of(settings).items()
    assert arguments["model"] == "org/target"
    assert env.items() >= replica_env_of(settings).items()
    assert env["OMP_NUM_THREADS"] == "2"
    # They travel to another process.
    assert json.loads(json.dumps(arguments)) == arguments


def test_what_cannot_be_served_cannot_be_measured() -> None:
    with pytest.raises(SettingsError, match=r"engine\.max_model_len"):
        start_arguments(deployment(max_model_len=1))
    with pytest.raises(SettingsError, match=r"engine\.adapter"):
        start_arguments(deployment(adapter="off"))


def test_a_benchmark_whose_libraries_are_missing_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    missing = EntryPoint("engine", "no_such_library:main", "tetris_serve.benchmarks")

    assert _run(missing, None) == 1  # type: ignore[arg-type]
    assert "No module named 'no_such_library'" in capsys.readouterr().err
