"""What a model's card is made of beside its log: the machine, and a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import torch

from loadtest.environment import describe_machine


def describe_hardware() -> dict[str, Any]:
    """Return what a model's card says of the machine that trained it."""
    machine = describe_machine()
    return {
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def load_template(file: Path) -> jinja2.Template:
    """Return a card's template."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(file.read_text())
