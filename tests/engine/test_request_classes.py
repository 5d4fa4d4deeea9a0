"""Request classes: read from the configuration, found for requests, seen to matter."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from serving.engine.shared.class_mix import ClassMix
from serving.engine.shared.request_classes import RequestClass, RequestClasses

CLASSES = {
    "interactive": {"weight": 4.0, "latency_target_ms": 30.0, "priority": -1},
    "batch": {"weight": 0.5, "priority": 10},
    "default": {"weight": 2.0},
}


def read(classes):
    return RequestClasses.from_section({"classes": classes})


def test_a_name_wins_over_a_priority_and_a_priority_over_the_default():
    asked = [(10, "interactive"), (10, None), (3, None), (3, ["no", "name"])]
    requests = []
    for priority, name in asked:
        params = SimpleNamespace(extra_args=name and {"request_class": name})
        own = {"request_id": str(len(requests)), "priority": priority}
        requests.append(SimpleNamespace(sampling_params=params, **own))
    classes = read(CLASSES)
    assert classes.weigh(requests).tolist() == [4.0, 0.5, 2.0, 2.0]
    assert classes.targets_ms(requests).tolist() == [30.0, *[np.inf] * 3]
    assert classes.tightest_target_ms(requests) == 30.0
    named = classes.by_name.values()
    assert classes.count(requests) == dict(zip(named, (1, 1, 2), strict=True))
    # Left out where they make no difference.
    plain = requests[2:]
    assert classes.weigh(plain) is None
    assert classes.targets_ms(plain) is None
    assert classes.tightest_target_ms([]) is None
    assert not read({}).count(requests)
    assert read({}).weigh(requests) is None
    assert read({"batch": {"weight": 0.5, "priority": 10}}).of(plain[0]).weight == 1.0


def test_a_class_that_pauses_still_counts_and_one_that_is_gone_does_not():
    urgent, patient = RequestClass(4.0, 30.0), RequestClass(0.5)
    mix = ClassMix()
    for _ in range(500):
        mix.note(Counter({urgent: 4, patient: 4}))
    alone = Counter({patient: 8})
    for _ in range(8):
        found = sorted(mix.note(alone))
    assert found == [
        (30.0, 4.0, pytest.approx(3.8, abs=0.1)),
        (np.inf, 0.5, pytest.approx(4.2, abs=0.1)),
    ]
    # Nothing runs while all wait.
    assert sorted(mix.note(Counter())) == found
    for _ in range(1000):
        mix.note(alone)
    assert mix.note(alone) == ()


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"a": {"wieght": 1}}, r"class 'a' has no wieght; it may hold weight, "),
        ({"a": {"weight": 0}}, r"class 'a': weight must be > 0, got 0"),
        ({"a": {"latency_target_ms": -5}}, r"latency_target_ms must be > 0, got -5"),
        ({name: {"priority": 1} for name in "ab"}, r"priority 1 belongs to another"),
    ],
)
def test_classes_that_make_no_sense_are_refused(classes, message):
    with pytest.raises(ValueError, match=message):
        read(classes)
