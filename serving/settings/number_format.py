"""The number format that fits this machine's processor.

vLLM computes in the format of the weights, mostly bfloat16. A processor without
instructions for it converts every number first, and is several times faster in float32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from serving.settings.finding import Finding
from serving.settings.model import Settings
from serving.settings.model_files import ModelFiles, read_model, weigh_model

_CPU_INFO: Final = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names of the instructions that multiply bfloat16, on x86 and on Arm."""

_WEIGHTS_SHARE: Final = 4
"""One in so many parts of the memory that is free may go to larger weights."""


def lacks_bfloat16(cpu_info: Path = _CPU_INFO) -> bool:
    """Tell whether bfloat16 has to be converted before every multiplication.

    Args:
        cpu_info: Linux's description of the processor.

    Returns:
        False also where nothing says so.
    """
    try:
        words = cpu_info.read_text(encoding="utf-8").split()
    except OSError:
        return False
    return _BFLOAT16_FLAGS.isdisjoint(words)


def with_fast_format(settings: Settings, tell: Callable[[Finding], None]) -> Settings:
    """Take float32 where it is the faster one here, fits, and nobody named a format.

    For servers that run on this machine alone: a fleet's processors may differ, and
    all of its engines have to compute alike.

    Args:
        settings: The deployment, its models at hand.
        tell: Is told if a format was chosen.
    """
    engine = settings.engine
    if engine.device != "cpu" or engine.dtype != "auto" or not lacks_bfloat16():
        return settings
    names = settings.model.target, settings.model.draft
    read = [read_model(name, "", []) for name in names if name is not None]
    models = [model for model in read if model is not None]
    is_slow = len(models) == len(read) and models[0].dtype == "bfloat16"
    if not (is_slow and _fits(settings, models)):
        return settings
    message = "float32: this CPU has no instructions for bfloat16; name that to keep it"
    tell(Finding("note", "engine.dtype", message))
    engine = engine.model_copy(update={"dtype": "float32"})
    return settings.model_copy(update={"engine": engine})


def _fits(settings: Settings, models: list[ModelFiles]) -> bool:
    """Tell whether weights and a request of full length have room in float32."""
    weights = [weigh_model(model.name) for model in models]
    added = sum(weights) * settings.replicas.max
    if 0 in weights or added > psutil.virtual_memory().available // _WEIGHTS_SHARE:
        return False
    cache = settings.engine.kv_cache_memory_bytes
    tokens = [model.kv_token_bytes for model in models]
    needed = 2 * settings.engine.max_model_len * sum(filter(None, tokens))
    return cache is None or (None not in tokens and needed <= cache)
