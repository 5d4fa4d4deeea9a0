"""Options from a command line and from files: a scenario's, a deployment's settings."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from serving.settings.model import parse_settings

_RIVALS = (
    ("router", "autoscaler"),
    ("rate", "utilisation"),
    ("trace", "load"),
    ("trace", "sessions"),
)
"""What counts more takes the other away."""


def parse_options(parser: ArgumentParser, given: Sequence[str]) -> Namespace:
    """Read a command line, and the files it names: it counts most, a deployment least.

    Args:
        parser: Its `scenario` is options with their values; `deployment`, which a
            scenario can name too, settings as `tetris-serve up` takes them.
        given: Words.

    Raises:
        ValueError: If a file cannot be read, or is no such file.
    """
    options = vars(parser.parse_args([]))

    def parse(words: Sequence[str]) -> dict[str, Any]:
        unset = Namespace(**dict.fromkeys(options))
        found = vars(parser.parse_args(words, unset))
        return {name: value for name, value in found.items() if value is not None}

    layers = [parse(given)]
    if scenario := layers[0].get("scenario"):
        data = _read(scenario, "scenario")
        known = [name.replace("_", "-") for name in options]
        for name in data.keys() - set(known):
            (near, *_) = [
                *get_close_matches(str(name), known, 1),
                "--help for all of them",
            ]
            raise ValueError(f"scenario {scenario}: no option {name!r}; see {near}")
        layers.append(parse(_to_words(data)))
    if found := [one["deployment"] for one in layers if "deployment" in one]:
        layers.append(parse(_to_words(read_deployment(found[0]))))
    for layer in reversed(layers):
        for pair in _RIVALS:
            if layer.keys() & pair:
                options |= dict.fromkeys(pair)
        options |= layer
    return Namespace(**options)


def _to_words(data: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in data.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}", str(one)]
    return words


def read_deployment(path: Path) -> dict[str, Any]:
    """Return the options that stand for a deployment: batch, drafts and autoscaler.

    Of its model only the device is looked at: `--engine` says how fast a replica is.

    Args:
        path: Settings as `tetris-serve up` takes them, or a chart's values.

    Raises:
        ValueError: If it cannot be served, naming the settings at fault.
    """
    data: Any = _read(path, "deployment")
    source = str(path)
    if "config" in data:
        data, source = data["config"], f"{path}: config"
    if isinstance(data, dict) and isinstance(data.get("engine"), dict):
        # Only vLLM could check it, which takes seconds to load.
        data["engine"].pop("extra", None)
    settings = parse_settings(data, source)
    replicas, policy = settings.replicas, settings.policy
    target, name = replicas.target_ongoing_requests, "target-ongoing"
    if replicas.target_token_ms is not None:
        target, name = replicas.target_token_ms, "ours"
    is_tetris = policy.name == "tetris"
    found = {
        "batch": settings.engine.max_num_seqs,
        "drafts": policy.draft_tokens if is_tetris else policy.num_speculative_tokens,
        "select": policy.name == "goodput",
        "autoscaler": [f"{name}:{target:g}"],
        "replicas": replicas.max,
        "min-replicas": replicas.min,
        "upscale-delay-s": replicas.upscale_delay_s,
        "downscale-delay-s": replicas.downscale_delay_s,
    }
    is_cpu = settings.engine.device == "cpu"
    return found | ({"engine": "cpu-demo-100m"} if is_cpu else {})


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{kind} {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{kind} {path}: options with their values are expected")
    return data
