"""What is noted of a training run: its log, with the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from loadtest.environment import describe_machine

LOG = "training_log.json"


def describe_hardware(device: str = "cpu") -> dict[str, Any]:
    """Return what a model's log says of the machine that trained it, on this device."""
    machine = describe_machine()
    gpu = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    return gpu | {
        "cpu": machine["cpu"],
        "cores": machine["cores"],
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
    }


def write_json(file: Path, value: Any) -> None:
    """Write a log or an evaluation."""
    file.write_text(json.dumps(value, indent=1) + "\n")
