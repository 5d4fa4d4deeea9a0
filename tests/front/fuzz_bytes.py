"""Let atheris choose the bytes, by what code they reach; it is in no lock.

uv run --no-project --python .venv --with atheris \
    python -m tests.front.fuzz_bytes tests/front/bodies -runs=100000

What fails is written into the current folder (`crash-*`); in tests/front/bodies it is
one more case of `test_any_bytes.py`.
"""

from __future__ import annotations

import logging
import sys

import atheris

with atheris.instrument_imports(include=["serving.front"]):
    from tests.front.test_any_bytes import Bodies, stream


def main() -> None:
    """Run until something fails, or as long as libFuzzer's options say."""
    logging.disable(logging.CRITICAL)
    bodies = Bodies()

    def try_bytes(content: bytes) -> None:
        bodies.post(content)
        stream(content)

    atheris.Setup(sys.argv, try_bytes)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
