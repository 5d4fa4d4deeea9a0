"""vLLM general plugin: makes the scheduler's figures reachable from outside.

vLLM loads general plugins in every process it starts, before the engine is built, and
possibly more than once.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from typing import Any, Final

import numpy as np

from serving.engine.shared.heap import HeapTrimmer

DIE_WITH_PARENT: Final = "TETRIS_DIE_WITH_PARENT"
"""Set where an engine core must not outlive the process that started it."""

_PR_SET_PDEATHSIG: Final = 1

_heap = HeapTrimmer()


def register() -> None:
    """Add our utilities to vLLM's engine core; idempotent.

    `engine_core.call_utility_async(name)` looks methods up on `EngineCore`, so adding
    them is all it takes. Engines whose vLLM this release does not know are left alone:
    plugins run in every vLLM on the machine, not only in ours.
    """
    from serving.engine.version import find_vllm_mismatch

    if find_vllm_mismatch() is not None:
        return
    _keep_llvmlite_apart()
    from serving.engine.compat import EngineCore
    from serving.engine.shared import replay

    EngineCore.tetris_snapshot = _snapshot
    EngineCore.tetris_export_state = _export_state
    EngineCore.tetris_import_state = _import_state
    EngineCore.tetris_change_policy = _change_policy
    EngineCore.tetris_watch_board = _watch_board
    replay.install()
    if os.environ.get(DIE_WITH_PARENT) and _is_engine_core():
        _die_with_parent()


def _is_engine_core() -> bool:
    return multiprocessing.current_process().name.startswith("EngineCore")


def _die_with_parent() -> None:
    """End with the replica's actor, however that ends (Linux only).

    An engine whose actor was killed would run on: nobody is left to read from it, and
    it would keep its memory and its cores from the replica that takes over.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _keep_llvmlite_apart() -> None:
    """Give llvmlite's library object an empty `__dict__`.

    It has none, but looks every name up in the shared library, finds something, and
    hands that out. vLLM's CPU platform reads the `__dict__` of all objects in all
    modules (`dispatcher._rebind_kernels`): no engine would start in a process that had
    imported Numba before.
    """
    from llvmlite.binding import ffi

    functions: dict[str, Any] = getattr(ffi.lib, "_fntab", {})
    functions.setdefault("__dict__", {})


def to_plain(value: Any) -> Any:
    """Return dicts, lists, strings, numbers and None in place of NumPy's types.

    vLLM encodes what a utility returns in a thread of its own, which a type it does not
    know ends for good, and no request is ever answered again. Refusing it here fails
    only the one call.

    Raises:
        TypeError: It holds something else.
    """
    # Before the plain types: NumPy's float64 is a float as well.
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot leave the engine's process")


def _snapshot(engine_core: Any) -> dict[str, Any]:
    """Return the scheduler's counters; {} under a scheduler that keeps none.

    Replicas ask about once a second, whatever the policy: a heartbeat of the process.
    """
    _heap.trim(time.monotonic())
    take = getattr(engine_core.scheduler, "snapshot", None)
    return to_plain(take()) if callable(take) else {}


def _export_state(engine_core: Any) -> dict[str, Any]:
    """Return what the planner learnt; {} under a scheduler that learns nothing."""
    export = getattr(engine_core.scheduler, "export_state", None)
    return to_plain(export()) if callable(export) else {}


def _import_state(engine_core: Any, state: dict[str, Any]) -> str:
    """Let the planner start from another engine's state; say why if it refuses.

    Of an exception nothing but its text would leave the engine's process.
    """
    try:
        engine_core.scheduler.import_state(state)
    except ValueError as error:
        return str(error)
    return ""


def _change_policy(engine_core: Any, section: dict[str, Any]) -> str:
    """Put another policy in charge; say why if that cannot be."""
    change = getattr(engine_core.scheduler, "change_policy", None)
    if not callable(change):
        return "this engine runs vLLM's own scheduler, which has no policy to change"
    try:
        change(section)
    except ValueError as error:
        return str(error)
    except Exception as error:  # Of somebody else's policy.
        return f"it cannot be built: {error!r}"
    return ""


def _watch_board(engine_core: Any, after: int, with_ids: bool) -> dict[str, Any]:
    """Return the newest steps and keep recording; {} where nothing can be shown."""
    watch = getattr(engine_core.scheduler, "watch_board", None)
    return to_plain(watch(after, with_ids=with_ids)) if callable(watch) else {}
