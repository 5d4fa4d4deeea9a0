"""Settings that change while a deployment runs; it does in helm/test_live."""

from typing import Any

import pytest

from serving.front.request_class import ClassShare, check_priorities
from serving.settings.live import read_live
from serving.settings.model import SettingsError


@pytest.mark.parametrize(
    ("user_config", "reason"),
    [
        ({"policy": {"name": "none"}}, "policy.name: name the policy"),
        ({"policy": {"draft_tokens": 2}}, "policy.name: name the policy"),
        ({"policy": {"name": "goodput", "method": "ngram"}}, "policy.method: only at"),
        ({"policy": {"name": "goodput", "colour": 1}}, "policy.colour: unknown"),
        ({"replicas": {"max": 4}}, "replicas.max: unknown"),
        ({"replicas": {"max_queued_requests": -1}}, "must be ≥ 0"),
        ("fast", "user_config"),
        ([], "user_config"),
    ],
)
def test_what_cannot_change_is_refused_by_name(user_config: Any, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        read_live(user_config)


def test_a_first_priority_needs_engines_that_were_started_for_it() -> None:
    urgent = {"a": ClassShare(priority=0)}
    with pytest.raises(ValueError, match="redeploy"):
        check_priorities({"a": ClassShare()}, urgent)
    check_priorities({"b": ClassShare(priority=3)}, urgent)
