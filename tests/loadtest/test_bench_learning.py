"""What a noisy clock costs, on a made-up engine."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.bench_learning import (
    MAX_DEPTH,
    Clock,
    MadeUpLoad,
    Noise,
    compare,
    main,
    play,
)


def test_learning_from_a_quiet_clock_costs_next_to_nothing() -> None:
    learnt, fixed = np.transpose([compare(8, Noise(0.02), s, 200) for s in range(3)])
    assert learnt.mean() > 0.98
    # Knowing the prices is worth more than any fixed length, or nothing is shown.
    assert (fixed < 1.0).all()


def test_what_is_drawn_does_not_depend_on_what_was_decided() -> None:
    one, other = MadeUpLoad(3, seed=1), MadeUpLoad(3, seed=1)
    one.advance(np.array([1, 2, 1]))
    other.advance(np.array([1, 1, 1]))
    for drawn, again in zip(one.draw(5), other.draw(5), strict=True):
        assert drawn.shape == (3, MAX_DEPTH)
        np.testing.assert_array_equal(drawn, again)


def test_ended_requests_are_followed_by_others_with_their_prompts() -> None:
    load = MadeUpLoad(2, seed=0)
    assert load.advance(np.array([1000, 1])) == ["0"]
    assert load.ids == ["2", "1"]
    assert load.has_prompt.tolist() == [True, False]


def test_a_fixed_length_of_nothing_brings_a_token_a_step() -> None:
    speed = play(0, MadeUpLoad(1, seed=0), Clock(None, 0), 40)
    # 46 + 2.2 ms of the target, 2 of the drafter's pass, 4 of the host.
    assert speed == pytest.approx(1 / 54.5, rel=0.1)


def test_the_ratios_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--requests", "2", "--steps", "20", "--seeds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("2 requests, quiet: learnt ")
    assert len(lines) == 4
