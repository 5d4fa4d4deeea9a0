"""The class a request names: found, refused, and turned into a priority."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.shared import request_classes
from serving.front.request_class import (
    REQUEST_CLASS_XARG,
    ClassShare,
    find_unknown_class,
    set_priority,
)

CLASSES = {"chat": ClassShare(priority=-1), "bulk": ClassShare()}
UNKNOWN = r"no such class .*(chta|chat)'.*; .* policy\.classes \(bulk, chat\)"


@pytest.mark.parametrize(
    ("name", "classes", "problem", "priority"),
    [
        (None, CLASSES, None, 7),
        ("chat", CLASSES, None, -1),
        ("bulk", CLASSES, None, 7),
        ("chta", CLASSES, UNKNOWN, 7),
        # Something else than a name.
        (["chat"], CLASSES, UNKNOWN, 7),
        ("chat", {}, "none are configured", 7),
    ],
)
def test_a_named_class_sets_its_priority_and_an_unknown_one_is_refused(
    name, classes, problem, priority
):
    xargs = None if name is None else {"request_class": name}
    request: Any = SimpleNamespace(vllm_xargs=xargs, priority=7)
    found = find_unknown_class(request, classes)
    if problem is None:
        assert found is None
    else:
        assert re.search(problem, found or "")
    set_priority(request, classes)
    assert request.priority == priority
    # Requests of other kinds name none.
    other: Any = SimpleNamespace()
    assert find_unknown_class(other, classes) is None
    set_priority(other, classes)
    assert not hasattr(other, "priority")


@pytest.mark.vllm
def test_replica_and_scheduler_read_the_same_key():
    assert request_classes.REQUEST_CLASS_XARG == REQUEST_CLASS_XARG
