"""Options from files: a scenario's, and what a deployment's settings say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

_RIVALS = (
    ("router", "router"),
    ("autoscaler", "autoscaler"),
    ("router", "autoscaler"),
    ("rate", "utilisation"),
)
"""What cannot be given twice, or with the other."""


def read_words(
    scenario: Path | None, deployment: Path | None, given: Sequence[str]
) -> list[str]:
    """Return the words of a command line for which files stand.

    Args:
        scenario: Options with their values, or None.
        deployment: Settings as `tetris-serve up` takes them, or None; a scenario can
            name it, and counts more.
        given: Words of the command line itself, which count most: options that must
            not stand beside one of theirs are left out.

    Raises:
        ValueError: If a file cannot be read, or is no such file.
    """
    data = {} if scenario is None else _read(scenario, "scenario")
    named = data.pop("deployment", None)
    if deployment is None and named is not None:
        deployment = Path(named)
    if deployment is not None:
        found = read_deployment(_read(deployment, "deployment"))
        for one, other in _RIVALS:
            if one in data:
                found.pop(other, None)
        data = found | data
    for pair in _RIVALS:
        for one, other in (pair, pair[::-1]):
            if any(word.split("=")[0] == f"--{one}" for word in given):
                data.pop(other, None)
    words = []
    for name, value in data.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{name}", str(one)]
    return words


def read_deployment(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that stand for a deployment: batch, drafts and autoscaler.

    Its model is not looked at: `--engine` says how fast a replica is.
    """
    engine, policy, replicas = (
        settings.get(part) or {} for part in ("engine", "policy", "replicas")
    )
    drafts = policy.get("max_draft_tokens", policy.get("draft_tokens"))
    if policy.get("name") == "none":
        drafts = 0
    scaler = f"target-ongoing:{replicas.get('target_ongoing_requests', 16)}"
    if replicas.get("target_token_ms") is not None:
        scaler = f"ours:{replicas['target_token_ms']}"
    found = {
        "batch": engine.get("max_num_seqs", 32),
        "select": policy.get("name", "goodput") == "goodput",
        "autoscaler": [scaler],
    }
    return found if drafts is None else found | {"drafts": drafts}


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{kind} {path}: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{kind} {path}: options with their values are expected")
    return data
