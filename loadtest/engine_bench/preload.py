"""The environment in which an engine runs fast on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_OPENMP = ("lib/libiomp5.so",)
_TCMALLOC = (
    "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib/aarch64-linux-gnu/libtcmalloc_minimal.so.4",
    "/usr/lib64/libtcmalloc_minimal.so.4",
)


def find_preloads() -> list[Path]:
    """Return the libraries vLLM wants preloaded, where they are installed.

    Intel's OpenMP (package intel-openmp) matters most with speculation; tcmalloc is
    a system package.
    """
    openmp = [Path(sys.prefix) / name for name in _OPENMP]
    found = [path for path in openmp if path.exists()]
    found += [path for path in map(Path, _TCMALLOC) if path.exists()][:1]
    return found


def engine_env(
    env: Mapping[str, str], cpus: Sequence[int], import_root: Path
) -> dict[str, str]:
    """Return the environment of an engine's process.

    Threads are bound to the cores as vLLM's own launcher binds them, which an engine
    inside the process does not pass through.

    Args:
        env: Environment to start from.
        cpus: Cores of the engine; none for an engine on a GPU, which is bound to none.
        import_root: Folder that holds our packages.
    """
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(
            [str(import_root), *filter(None, [env.get("PYTHONPATH")])]
        ),
    }
    if not cpus:
        return dict(env) | own
    libraries = [str(path) for path in find_preloads()]
    if inherited := env.get("LD_PRELOAD"):
        libraries.append(inherited)
    cores = ",".join(map(str, cpus))
    own["OMP_NUM_THREADS"] = str(len(cpus))
    if libraries:
        own["LD_PRELOAD"] = ":".join(libraries)
    if any("iomp" in library for library in libraries):
        own["KMP_AFFINITY"] = f"granularity=fine,explicit,proclist=[{cores}]"
        own["KMP_BLOCKTIME"] = "5"
        own["KMP_TPAUSE"] = "0"
    else:
        own["OMP_PLACES"] = f"{{{cores}}}"
        own["OMP_PROC_BIND"] = "true"
    return dict(env) | own
