"""Forward passes that are timed at start-up."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.engine.conftest import run_engine

pytestmark = pytest.mark.vllm

MOST_TOKENS = 64


def test_passes_are_timed_at_every_count_a_step_can_carry(tiny_pair, monkeypatch):
    from serving.engine.cpu.profile import profile_passes

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


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_one_pass_of_the_drafter_is_priced_however_many_it_makes(
    in_one_pass, monkeypatch
):
    """A clock that passes alone move: 10 ms a target's, 2 ms a drafter's."""
    from serving.engine.compat_cpu import SpecDecodeBaseProposer
    from serving.engine.cpu import profile

    now_s = 0.0

    class Drafter(SpecDecodeBaseProposer):
        num_speculative_tokens = 4
        parallel_drafting = in_one_pass

        def __init__(self):
            """Load nothing."""

        def dummy_run(self, _):
            nonlocal now_s
            now_s += 0.002 * (1 if in_one_pass else 4)

    class Runner:
        max_num_tokens = 4
        drafter = Drafter()
        model = SimpleNamespace(compute_logits=lambda hidden_states: hidden_states)

        def _dummy_run(self, num_tokens):
            nonlocal now_s
            now_s += 0.01
            self.drafter.dummy_run(num_tokens)
            return [0] * num_tokens, None

    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now_s))
    timed = profile.profile_passes(Runner())
    assert timed is not None
    assert timed.target_ms == pytest.approx((10.0, 10.0, 10.0))
    assert timed.draft_ms == pytest.approx((2.0, 2.0, 2.0))
    assert timed.drafts_in_one_pass is in_one_pass
