"""Forward passes that are timed at start-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.engine.conftest import run_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.vllm

MOST_TOKENS = 64


def test_passes_are_timed_at_every_count_a_step_can_carry(
    tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from serving.engine.profile import profile_passes

    with run_engine(
        *tiny_pair, policy="goodput", max_num_batched_tokens=MOST_TOKENS
    ) as engine:
        profile = profile_passes(engine.runner)
        monkeypatch.setattr(engine.runner, "_dummy_run", lambda _: 1 / 0)
        broken = profile_passes(engine.runner)

    assert profile is not None
    assert profile.num_tokens == (1, 2, 4, 8, 16, 32, MOST_TOKENS)
    assert len(profile.target_ms) == len(profile.draft_ms) == 7
    assert np.all(np.array(profile.target_ms + profile.draft_ms) > 0.0)
    assert np.isfinite(profile.target_ms + profile.draft_ms).all()
    # An engine that cannot be profiled serves all the same.
    assert broken is None
