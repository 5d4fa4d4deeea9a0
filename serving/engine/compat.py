"""The door to vLLM's private names, and a check that they are there; one vLLM version.

Other modules import vLLM's private classes from here, those of the CPU worker from
`compat_cpu`: importing that worker replaces parts of `torch.cuda`. A name is imported
when it is asked for, because the plugin brings this module into every vLLM process, on
whatever device. `compat_names` lists all that is leaned on.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from serving.contract import check_names, read_rows
from serving.engine import front_names
from serving.engine.compat_names import GPU_SCHEDULER, GPU_WORKER, SCHEDULER
from serving.engine.version import SUPPORTED_VLLM, find_vllm_mismatch

if TYPE_CHECKING:
    from serving.contract import Table

_RENAMED: Final = {
    "GPUWorker": "vllm.v1.worker.gpu_worker:Worker",
    "GPUModelRunnerV2": "vllm.v1.worker.gpu.model_runner:GPUModelRunner",
}
"""Names whose vLLM name means something else beside the others here."""


def _find_exports() -> dict[str, str]:
    exports = dict(_RENAMED)
    for table in (SCHEDULER, GPU_SCHEDULER, GPU_WORKER, *front_names.ALL):
        for where, rows in table.items():
            module, _, name = where.partition(":")
            for one in [name] if name else [row.name for row in read_rows(rows)]:
                exports.setdefault(one, f"{module}:{one}")
    return exports


_EXPORTS: Final = _find_exports()
"""What other modules may import from here: `module:name`."""


_MODULES: Final = {
    "async_llm": "vllm.v1.engine.async_llm",
    "core_client": "vllm.v1.engine.core_client",
}
"""Modules in which a name is replaced."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _EXPORTS[name].partition(":")
    return getattr(import_module(module), original)


def check_version() -> None:
    """Refuse any vLLM but the supported one.

    Raises:
        ImportError: It is another, or none.
    """
    mismatch = find_vllm_mismatch()
    if mismatch is not None:
        raise ImportError(mismatch)


def check(*tables: Table) -> None:
    """Refuse a vLLM that has moved what this process leans on.

    Raises:
        MovedNamesError: With every name that moved and what it was for.
    """
    for table in tables:
        check_names("vLLM", SUPPORTED_VLLM, table)


check_version()
