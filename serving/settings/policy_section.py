"""The section `policy` of a deployment file, and its classes of requests."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema

from serving.draft_lengths import DRAFT_TOKENS, MAX_DRAFT_TOKENS, TETRIS_MARGIN
from serving.settings.names import allow_old_names
from serving.settings.section import Section

POLICIES: Final = ("none", "fixed", "tetris", "dynamic", "goodput")
"""The policies that come with this package; `policies.registry` builds the same."""

_OWN_POLICY: Final = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A planner of somebody's own, as `module:Class`."""


def _check_policy(name: str) -> str:
    if name in POLICIES or re.fullmatch(_OWN_POLICY, name):
        return name
    known = ", ".join(map(repr, POLICIES))
    raise ValueError(
        f"must be one of {known}, or a planner of your own as module:Class "
        f"(got {name!r})"
    )


PolicyName = Annotated[
    str,
    AfterValidator(_check_policy),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(POLICIES)},
                {"pattern": f"^{_OWN_POLICY}$", "description": "`module:Class`"},
            ]
        }
    ),
]

DraftMethod = Literal[
    "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix"
]


class RequestClassSettings(Section):
    """Requests that are treated alike.

    A request belongs to the class that `vllm_xargs.request_class` names, else to the
    one with its `priority`, else to the class called `default`, if there is one.
    """

    weight: Annotated[
        float,
        Field(gt=0, le=1000, description="what a token is worth compared with others"),
    ] = 1.0
    latency_target_ms: Annotated[
        float | None,
        Field(
            gt=0, description="longest time per token; drafts are given for it first"
        ),
    ] = None
    priority: Annotated[
        int | None,
        Field(description="vLLM's priority of the class; lower is served earlier"),
    ] = None
    deadline_ms: Annotated[
        float | None,
        Field(
            gt=0,
            description="time for a whole answer, for requests that bring no "
            "deadline_ms; one predicted to take longer is refused with 429",
        ),
    ] = None


class PolicySettings(Section):
    """What is drafted and what is verified.

    `none` starts the engine without a drafter; `fixed` verifies `draft_tokens` of every
    request; `tetris` verifies as many in total, but the best ones of drafts that are
    `max_draft_tokens` deep; `dynamic` and `goodput` choose how many from measured
    costs, with drafts of at most `max_draft_tokens`. `module:Class` names a planner of
    your own (`policies.planner`); its class is built with `params`.

    Where no name is given it is `none` without a drafter, `fixed` on a GPU (where
    `goodput` has not been measured yet), and `goodput` otherwise.
    """

    model_config = ConfigDict(json_schema_extra=allow_old_names)

    name: Annotated[PolicyName, Field(description="the verification policy")] = (
        "goodput"
    )
    method: Annotated[DraftMethod, Field(description="the drafting method")] = (
        "draft_model"
    )
    draft_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=32,
            description="draft tokens that fixed, and tetris on average, verifies per "
            "request and step",
        ),
    ] = DRAFT_TOKENS
    max_draft_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="the longest draft that tetris, dynamic and goodput choose "
            f"from; unset: {MAX_DRAFT_TOKENS}, for tetris {TETRIS_MARGIN} more than "
            "draft_tokens",
        ),
    ] = None
    latency_target_ms: Annotated[
        float | None,
        Field(gt=0, description="longest time between two steps; goodput keeps to it"),
    ] = None
    params: Annotated[
        dict[str, Any],
        Field(description="what a policy of your own (module:Class) is built with"),
    ] = {}
    audit: Annotated[
        float,
        Field(
            ge=0,
            le=0.2,
            description="share of steps in which the engine does without speculation, "
            "or with a fixed length, to find out what the policy gains, and to switch "
            "it off where it loses; 0: never. On the CPU",
        ),
    ] = 0.015
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"],
        Field(
            description="how the draft model picks its tokens: its likeliest, or drawn "
            "at the request's temperature; if that is not 0, more of these are accepted"
        ),
    ] = "greedy"
    classes: Annotated[
        dict[str, RequestClassSettings],
        Field(description="classes of requests by name; goodput weighs by them"),
    ] = {}
    watchdog: Annotated[
        bool,
        Field(
            description="leave drafts out where acceptance has collapsed, until they "
            "are accepted again"
        ),
    ] = True
    extra: Annotated[
        dict[str, Any], Field(description="more fields of vLLM's speculative_config")
    ] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Draft depth the engine is started with (0 without speculation)."""
        if self.name == "none":
            return 0
        if self.name == "fixed":
            return self.draft_tokens
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        is_constant = self.name == "tetris"
        return self.draft_tokens + TETRIS_MARGIN if is_constant else MAX_DRAFT_TOKENS
