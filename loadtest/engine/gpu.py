"""What differs where the engines run on an NVIDIA GPU.

One engine at a time holds it, as two of a real model seldom fit beside each other. No
core is pinned and nothing is padded unless asked for. `fixed` is what a server runs on
a GPU: vLLM's own speculation.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from loadtest.arms import Arm
from loadtest.client.errors import LoadTestError

from .arms import COLD, UPSTREAM
from .plan import Cell
from .workloads import NEIGHBOUR


def find_gpu() -> str:
    """Return the name of this machine's first GPU.

    Raises:
        LoadTestError: If there is none, or what is installed here is for CPUs.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
    except Exception as error:
        raise LoadTestError(
            f"--device gpu: no NVIDIA GPU is found here ({error}); nvidia-smi must "
            "list one, and the set-up be done with TETRIS_DEVICE=gpu; or leave out "
            "--device gpu"
        ) from error


def check_device(
    options: argparse.Namespace, arms: Sequence[Arm], cells: Sequence[Cell]
) -> None:
    """Refuse what the device asked for does not have.

    Args:
        options: The command line's.
        arms: To be measured.
        cells: To be measured.

    Raises:
        LoadTestError: With the options at fault.
    """
    if options.device == "cpu":
        if any(arm.policy == UPSTREAM for arm in arms):
            raise LoadTestError(
                f"--policies {UPSTREAM} is vLLM's own verification, which it has on "
                "GPUs alone; leave it out, or add --device gpu"
            )
        return
    wanted = {
        f"--policies {COLD}": any(arm.policy == COLD for arm in arms),
        f"--workloads {NEIGHBOUR}": any(cell.workload == NEIGHBOUR for cell in cells),
    }
    if any(wanted.values()):
        found = ", ".join(name for name, is_wanted in wanted.items() if is_wanted)
        raise LoadTestError(
            f"{found}: nothing of the kind with --device gpu; leave that out, name "
            "other policies or workloads, or leave out --device gpu"
        )
