"""configs/README.md lists the settings as they are."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "configs" / "README.md"


def test_the_reference_is_the_settings_own() -> None:
    script = ROOT / ".ci" / "settings_reference.py"
    result = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "row",
    [
        "| `graceful_shutdown_timeout_s` | Ray Serve | `replicas.drain_timeout_s` |",
        "| `num_speculative_tokens` | vLLM | `policy.draft_tokens` |",
        "| `max_body_bytes` | the largest request body accepted, e.g. 4Mi | bytes or a "
        "size such as `512Mi` | `4Mi` |",
    ],
)
def test_the_reference_has_names_and_sizes_as_people_write_them(row: str) -> None:
    assert row in README.read_text("utf-8").splitlines()
