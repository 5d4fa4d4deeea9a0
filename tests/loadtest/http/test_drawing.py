"""Figures of a report."""

from __future__ import annotations

from loadtest.client.outcome import Outcome
from loadtest.client.records import Records
from loadtest.report.figures import draw_soak, draw_timeline, styles_of

PNG = b"\x89PNG"


def test_a_dozen_names_look_different_and_the_first_ones_are_plain_lines():
    names = [f"role {number}" for number in range(12)]
    styles = styles_of([*names, *names])
    assert list(styles) == names
    assert len({tuple(style.items()) for style in styles.values()}) == 12
    assert {styles[name]["linestyle"] for name in names[:7]} == {"-"}


def test_chaos_that_has_no_moment_has_no_line():
    records = Records(100.0, [Outcome("a", first_s=0.1, last_s=0.2, end_s=0.2)])
    timeline = [{"epoch_s": 100.0, "replicas": 2.0}, {"epoch_s": 105.0, "replicas": 0}]
    drawn = [
        draw_timeline(
            {"a": records}, {"a": {"timeline": timeline, "chaos": blows}}, 10.0
        )
        for blows in ([], [{"epoch_s": None}], [{"epoch_s": 103.0}])
    ]
    assert all(png is not None and png.startswith(PNG) for png in drawn)
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_soak_is_drawn_by_role():
    keys = ("memory_mib", "num_fds", "num_threads")
    samples = [
        {"epoch_s": 5.0 * n, "role": role, **dict.fromkeys(keys, n)}
        for n in range(3)
        for role in ("engine", "replica")
    ]
    drawn = draw_soak(samples)
    assert drawn is not None
    assert drawn.startswith(PNG)
    assert draw_soak([]) is None
