"""Settings that change while a deployment runs; it does in helm/test_live."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.front.live_limits import LiveLimits
from serving.front.request_class import ClassShare
from serving.settings.live import LiveSettings, read_live
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


@pytest.mark.anyio
async def test_a_first_priority_needs_engines_that_were_started_for_it() -> None:
    urgent = LiveSettings.model_validate(
        {"policy": {"name": "goodput", "classes": {"a": {"priority": 0}}}}
    )
    limits = LiveLimits({"a": ClassShare()}, 1, 1, 0)
    with pytest.raises(ValueError, match="redeploy"):
        await limits.take(urgent)
    # What the engines were started for may be taken back, and given again.
    limits = LiveLimits({"b": ClassShare(priority=3)}, 1, 1, 0)
    for live, priority in (
        (LiveSettings.model_validate({"policy": {"name": "goodput"}}), None),
        (urgent, 0),
    ):
        await limits.take(live)
        shares = [one.priority for one in limits.classes.values()]
        assert shares == ([] if priority is None else [priority])


@pytest.mark.anyio
async def test_a_mistake_is_logged_and_counted_and_changes_nothing(
    monkeypatch, serve_log
):
    from serving import reloading

    counted: list[float] = []
    counter = SimpleNamespace(inc=counted.append)
    monkeypatch.setattr(reloading.metrics, "Counter", lambda *_: counter)
    taken: list[int | None] = []

    async def take(live: LiveSettings) -> None:
        taken.append(live.replicas.max_queued_requests)
        if taken[-1] == 1:
            raise ValueError("not so few")

    for user_config in ({"policy": 3}, {"replicas": {"max_queued_requests": 1}}, {}):
        await reloading.take_over(user_config, take)
    assert taken == [1, None]
    assert counted == [1, 1]
    assert "not so few" in serve_log.text
