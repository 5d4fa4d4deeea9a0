"""What a model's card is made of: its log, with the machine, and a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from loadtest.environment import describe_machine
from loadtest.page import make_environment

LOG, EVALUATION = "training_log.json", "evaluation.json"


def describe_hardware() -> dict[str, Any]:
    """Return what a model's card says of the machine that trained it."""
    machine = describe_machine()
    return {
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def write_json(file: Path, value: Any) -> None:
    """Write a log or an evaluation."""
    file.write_text(json.dumps(value, indent=1) + "\n")


def write_card(folder: Path, template: Path, **given: Any) -> None:
    """Write a model's ``README.md``."""
    templates = make_environment(template.parent)
    card = templates.get_template(template.name).render(given)
    (folder / "README.md").write_text(card)
