"""Reads from an engine's log where it waited for the device inside of steps."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

_WAIT = re.compile(
    r"^(?P<file>\S+?):(?P<line>\d+): \w*Warning: .*"
    r"(?:called a synchronizing CUDA operation|that may be silently synchronous)",
    re.MULTILINE,
)
_PACKAGES = ("serving", "policies", "loadtest", "vllm", "torch")


def count_waits(log: str) -> dict[str, int]:
    """Count the warnings of `VLLM_GPU_SYNC_CHECK=warn` by place.

    Returns:
        How often, by file from its package on and line, most often first.
    """
    counts = Counter(
        f"{_shorten(found['file'])}:{found['line']}" for found in _WAIT.finditer(log)
    )
    return dict(counts.most_common())


def _shorten(file: str) -> str:
    parts = Path(file).parts
    starts = [parts.index(name) for name in _PACKAGES if name in parts]
    return "/".join(parts[min(starts) :] if starts else parts[-1:])
