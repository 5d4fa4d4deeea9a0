"""The class a request names: found, refused, and turned into a priority."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from serving.engine.shared import request_classes
from serving.front.request_class import (
    REQUEST_CLASS_XARG,
    find_unknown_class,
    set_priority,
)

PRIORITIES = {"chat": -1, "bulk": None}


def make_request(**xargs: Any) -> SimpleNamespace:
    return SimpleNamespace(vllm_xargs=xargs or None, priority=7)


@pytest.mark.parametrize("request_", [make_request(), SimpleNamespace()])
def test_a_request_need_not_name_a_class(request_: Any) -> None:
    assert find_unknown_class(request_, PRIORITIES) is None
    set_priority(request_, PRIORITIES)
    assert getattr(request_, "priority", 7) == 7


def test_a_named_class_sets_the_priority_it_has() -> None:
    chat, bulk = make_request(request_class="chat"), make_request(request_class="bulk")
    for request in (chat, bulk):
        assert find_unknown_class(request, PRIORITIES) is None
        set_priority(request, PRIORITIES)
    assert (chat.priority, bulk.priority) == (-1, 7)


@pytest.mark.parametrize(
    ("priorities", "message"),
    [
        (PRIORITIES, r"no such class 'chta'; .* policy\.classes \(bulk, chat\)"),
        ({}, r"none are configured"),
    ],
)
def test_an_unknown_class_is_refused_with_those_there_are(
    priorities: dict[str, int | None], message: str
) -> None:
    problem = find_unknown_class(make_request(request_class="chta"), priorities)
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem)


def test_something_else_than_a_name_is_refused_too() -> None:
    request = make_request(request_class=["chat"])
    assert "no such class" in (find_unknown_class(request, PRIORITIES) or "")
    set_priority(request, PRIORITIES)
    assert request.priority == 7


@pytest.mark.vllm
def test_replica_and_scheduler_read_the_same_key() -> None:
    assert request_classes.REQUEST_CLASS_XARG == REQUEST_CLASS_XARG
