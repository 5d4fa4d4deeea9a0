"""What may change while a deployment runs: `user_config` of Serve's deployments.

It has the sections of a deployment file, with these settings alone. Engines and fronts
take the same, each what is its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from serving.settings.model import SettingsError
from serving.settings.policy_section import PolicySettings
from serving.settings.report import describe
from serving.settings.section import Section

_AT_START: Final = ("method", "draft_sampling", "extra")
"""Settings of the policy that decide how an engine starts."""


class LiveReplicas(Section):
    """Of the section `replicas`."""

    min: Annotated[
        int | None,
        Field(ge=0, description="`autoscaling_config` has it too, but tells no front"),
    ] = None
    max_queued_requests: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


class LiveSettings(Section):
    """Settings that engines and fronts take over as they run; None for no change."""

    policy: PolicySettings | None = None
    replicas: LiveReplicas = LiveReplicas()


def read_live(user_config: Any) -> LiveSettings:
    """Read what Serve hands to `reconfigure`.

    Raises:
        SettingsError: One line for each fault.
    """
    try:
        live = LiveSettings.model_validate(user_config)
    except ValidationError as error:
        raise SettingsError(
            [f"user_config: {problem}" for problem in describe(error, LiveSettings)]
        ) from None
    policy = live.policy
    if policy is not None:
        if "name" not in policy.model_fields_set or policy.name == "none":
            raise SettingsError(
                [
                    "user_config: policy.name: name the policy; none is a start "
                    "without a drafter, so use fixed with draft_tokens: 1 at least"
                ]
            )
        if fixed := policy.model_fields_set.intersection(_AT_START):
            names = ", ".join(f"policy.{name}" for name in sorted(fixed))
            raise SettingsError(
                [f"user_config: {names}: only at a start; leave it out, or redeploy"]
            )
    return live
