"""What is compared: classes of requests, arms, loads; and what each arm is sent."""

import argparse
import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtest.arms import Arm, parse_arm
from loadtest.bench_command import load_presets
from loadtest.engine.models import pad
from loadtest.engine.plan import Block, deploy, describe_engine, longest_prompt
from loadtest.engine.workloads import RequestMaker
from loadtest.errors import LoadTestError
from loadtest.load.arrivals import Load, arrival_times

PRESETS = load_presets(Path(__file__).with_name("presets.yaml"))

PRIORITY, CLASSES = "priority", "classes"
"""What an arm is told of classes: vLLM's priorities alone, or weights and targets too.
Others take all requests for alike."""

KV_TOKENS = 512
"""Positions for which each request that fits has room, on average; ten engines share
this machine's memory."""

_NUM_CALIBRATED = 36
_PER_SLOT = 8
"""Requests that measure the time per token, and, for each that fits, the capacity."""


@dataclass(frozen=True, slots=True)
class RequestKind:
    """One of the classes, as it is asked for.

    Attributes:
        share: Of all requests.
        max_tokens: Of a reply.
        target: Longest time per token, in times of one request without speculation.
        weight: As in `policy.classes`; so is `priority`.
    """

    share: float
    max_tokens: int
    target: float
    weight: float
    priority: int


@dataclass(frozen=True, slots=True)
class Units:
    """What targets and loads are multiples of: what `none` does, measured first.

    Attributes:
        tpot_ms: Median time per token of requests that are alone.
        capacity_per_s: Requests answered per second when all come at once.
        other_cpu_share: The most that others used of the machine meanwhile.
    """

    tpot_ms: float = math.nan
    capacity_per_s: float = math.nan
    other_cpu_share: float = math.nan


@dataclass(frozen=True, slots=True)
class ClassArm(Arm):
    """A policy, and what its engine is told of classes; "" for nothing."""

    told: str = field(default="", kw_only=True)

    @property
    def name(self) -> str:
        """As in `parse_class_arm`."""
        numbers = self.draft_tokens, self.extra_draft_tokens
        plain = Arm(self.policy, *numbers, self.is_drawn).name
        return f"{plain}@{self.told}" if self.told else plain


def parse_class_arm(text: str) -> ClassArm:
    """Read an arm, e.g. `none`, `fixed:3@priority` or `goodput:6@classes`."""
    name, _, told = text.partition("@")
    if told not in ("", PRIORITY, CLASSES):
        raise ValueError(f"{text!r}: after @ comes {PRIORITY} or {CLASSES}")
    return ClassArm(**asdict(parse_arm(name)), told=told)


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run.

    Attributes:
        kinds: Classes by name.
        loads: Arrivals per second, as shares of the capacity.
        blocks: Of a load in a round, each with arrivals of its own.
        max_other_cpu: Largest share of the machine that others may use while units are
            measured.
        engine: The section `engine` of the deployment.
        units: As measured; who only measures these needs none.
    """

    kinds: Mapping[str, RequestKind]
    arms: tuple[ClassArm, ...]
    loads: tuple[float, ...]
    workload: str
    rounds: int
    blocks: int
    block_s: float
    max_other_cpu: float
    engine: dict[str, Any]
    target: Path
    draft: Path
    units: Units = field(default_factory=Units)

    def deployment(self, arm: ClassArm, /) -> dict[str, Any]:
        """Return the settings with which a server would run an arm's engine."""
        policy, classes = arm.settings(), dict[str, dict[str, float]]()
        for name, kind in self.kinds.items():
            classes[name] = {"priority": kind.priority}
            if arm.told == CLASSES:
                target_ms = kind.target * self.units.tpot_ms
                classes[name] |= {"weight": kind.weight, "latency_target_ms": target_ms}
        if arm.told:
            policy["classes"] = classes
        draft = None if arm.policy == "none" else self.draft
        return deploy(self.target, draft, policy, self.engine)

    def conditions(self) -> dict[str, Any]:
        """Return what results depend on, but for models, code, requests and machine.

        More rounds and loads may be added later.
        """
        return {
            "arms": [arm.name for arm in self.arms],
            "workload": self.workload,
            "classes": {name: asdict(kind) for name, kind in self.kinds.items()},
            "blocks": self.blocks,
            "block_s": self.block_s,
            **self.engine,
        }


def make_plan(options: argparse.Namespace) -> Plan:
    """Return what the command line asks for."""
    arms, loads = options.arms, options.loads
    if min(loads) <= 0:
        raise LoadTestError("--loads are shares of the capacity, above 0")
    kinds = {name: RequestKind(**own) for name, own in options.classes.items()}
    target, draft = pad(options.target, options.target_parameters), options.draft
    reply = max(kind.max_tokens for kind in kinds.values())
    reply += max(arm.max_depth for arm in arms)
    engine = describe_engine(
        (target, draft),
        num_engines=len(arms),
        length=longest_prompt(options.workload) + reply,
        most=options.max_num_seqs,
        dtype=options.dtype,
        kv_tokens=KV_TOKENS,
    )
    times = options.rounds, options.blocks, options.block_s
    own = (kinds, arms, loads, options.workload, *times, options.max_other_cpu)
    return Plan(*own, engine, target, draft)


def make_stream(
    plan: Plan, requests: RequestMaker, load: float, key: str
) -> tuple[Block, list[str]]:
    """Return requests that come as a Poisson process, and the class of each.

    The same for all arms; whom an arm's engine is to prefer is left out.
    """
    rate = load * plan.units.capacity_per_s
    poisson = Load("", "poisson", "constant", rate, rate, 1.0)
    due_s = arrival_times(poisson, plan.block_s, f"{requests.seed} {key}")
    if not due_s:
        raise LoadTestError(f"nobody comes at {rate:.2f} a second: raise --block-s")
    return _draw(plan, requests, due_s, key)


def make_crowd(plan: Plan, requests: RequestMaker) -> Block:
    """Return requests of all classes that come at once, to measure the capacity."""
    due_s = [0.0] * (_PER_SLOT * plan.engine["max_num_seqs"])
    return _draw(plan, requests, due_s, "capacity")[0]


def make_single(plan: Plan, requests: RequestMaker) -> Block:
    """Return requests that come one by one, to measure the time per token."""
    prompts = requests.draw(plan.workload, f"{requests.seed} alone", _NUM_CALIBRATED)
    return Block(prompts, 1, 0.0, requests.max_tokens, requests.eos_token_id)


def _draw(
    plan: Plan, requests: RequestMaker, due_s: list[float], key: str
) -> tuple[Block, list[str]]:
    draw = random.Random(f"{requests.seed} {key} classes")
    shares = [kind.share for kind in plan.kinds.values()]
    names = draw.choices([*plan.kinds], weights=shares, k=len(due_s))
    prompts = requests.draw(plan.workload, f"{requests.seed} {key}", len(due_s))
    limits = tuple(plan.kinds[name].max_tokens for name in names)
    place = len(names), 0.0, requests.max_tokens, requests.eos_token_id
    return Block(prompts, *place, due_s=tuple(due_s), limits=limits), names
