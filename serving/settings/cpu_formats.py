"""Which number formats this machine's processor computes in hardware."""

from pathlib import Path
from typing import Final

_CPU_INFO: Final = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Linux's names of the instructions that multiply bfloat16, on x86 and on Arm."""


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
