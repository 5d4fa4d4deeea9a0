"""Classes of requests: what a token of theirs is worth, and how soon it is wanted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from serving.engine.shared.options import ADDITIONAL_CONFIG_KEY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from serving.engine.compat import Request, VllmConfig

REQUEST_CLASS_XARG = "request_class"
"""Key in a request's `vllm_xargs` that names its class."""

DEFAULT_CLASS = "default"
"""The class of requests that name none and whose priority belongs to none."""


@dataclass(frozen=True, slots=True)
class RequestClass:
    """How a planner treats the requests of one class.

    Attributes:
        weight: What a token is worth compared with others, > 0.
        latency_target_ms: Longest time per token wanted, or None.
    """

    weight: float = 1.0
    latency_target_ms: float | None = None


@dataclass(slots=True)
class RequestClasses:
    """All classes of an engine, by name and by vLLM's `priority`.

    What a request's class is never changes during its life, so that deciding by it is
    lossless.
    """

    by_name: Mapping[str, RequestClass] = field(default_factory=dict)
    by_priority: Mapping[int, RequestClass] = field(default_factory=dict)
    # Looking a class up costs ten times what finding it here does, four times a step.
    _found: dict[str, RequestClass] = field(default_factory=dict, compare=False)

    @classmethod
    def read(cls, vllm_config: VllmConfig) -> RequestClasses:
        """Read the classes from an engine's configuration.

        Raises:
            ValueError: If a class has something else than a weight, a latency target
                and a priority, a number makes no sense, or two share a priority.
        """
        section = (vllm_config.additional_config or {}).get(ADDITIONAL_CONFIG_KEY)
        return cls.from_section(section or {})

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> RequestClasses:
        """Read the classes from our section of a configuration, errors as in `read`."""
        by_name: dict[str, RequestClass] = {}
        by_priority: dict[int, RequestClass] = {}
        for name, values in (section.get("classes") or {}).items():
            by_name[name] = _make_class(name, values)
            priority = values.get("priority")
            if priority is None:
                continue
            if priority in by_priority:
                raise ValueError(
                    f"class {name!r}: priority {priority} belongs to another class "
                    "already; give it one of its own"
                )
            by_priority[priority] = by_name[name]
        return cls(by_name, by_priority)

    def become(self, other: RequestClasses) -> None:
        """Have other classes from now on; requests there are keep what they were."""
        self.by_name, self.by_priority = other.by_name, other.by_priority

    def of(self, request: Request) -> RequestClass:
        """Return a request's class: by name, else by priority, else the default."""
        found = self._found.get(request.request_id)
        if found is None:
            found = self._found[request.request_id] = self._find(request)
        return found

    @property
    def names(self) -> list[str]:
        """The names of all classes; the last is that of requests in none."""
        return [*self.by_name, DEFAULT_CLASS]

    def index_of(self, request: Request) -> int:
        """Return the place of a request's class among the names."""
        own = self.of(request)
        for index, one in enumerate(self.by_name.values()):
            if one is own:
                return index
        return len(self.by_name)

    def forget(self, req_id: str) -> None:
        """Drop what is kept about a request that has ended."""
        self._found.pop(req_id, None)

    def _find(self, request: Request) -> RequestClass:
        params = request.sampling_params
        named = (params.extra_args or {}).get(REQUEST_CLASS_XARG) if params else None
        if isinstance(named, str) and named in self.by_name:
            return self.by_name[named]
        by_priority = self.by_priority.get(request.priority)
        return by_priority or self.by_name.get(DEFAULT_CLASS, _PLAIN)

    def weigh(self, requests: Sequence[Request]) -> NDArray[np.float64] | None:
        """Return the weight of each request, `[num_reqs]`; None if all are alike."""
        if not self.by_name:
            return None
        weights = [self.of(request).weight for request in requests]
        return np.array(weights) if len(set(weights)) > 1 else None

    def targets_ms(self, requests: Sequence[Request]) -> NDArray[np.float64] | None:
        """Return the latency target of each request, inf for none; None for none."""
        if not self.by_name:
            return None
        targets = [self.of(request).latency_target_ms for request in requests]
        if not any(targets):
            return None
        return np.array([target or np.inf for target in targets])

    def tightest_target_ms(self, requests: Sequence[Request]) -> float | None:
        """Return the smallest latency target of some requests; None for none."""
        if not self.by_name:
            return None
        targets = [self.of(request).latency_target_ms for request in requests]
        return min([target for target in targets if target], default=None)

    def count(self, requests: Sequence[Request]) -> Counter[RequestClass]:
        """Count some requests by class; empty where there are no classes."""
        if not self.by_name:
            return Counter()
        return Counter([self.of(request) for request in requests])


_PLAIN = RequestClass()


def _make_class(name: str, values: Mapping[str, Any]) -> RequestClass:
    unknown = values.keys() - {"weight", "latency_target_ms", "priority"}
    if unknown:
        raise ValueError(
            f"class {name!r} has no {', '.join(sorted(unknown))}; it may hold weight, "
            "latency_target_ms and priority"
        )
    weight, target_ms = values.get("weight", 1.0), values.get("latency_target_ms")
    if weight <= 0:
        raise ValueError(f"class {name!r}: weight must be > 0, got {weight}")
    if target_ms is not None and target_ms <= 0:
        raise ValueError(
            f"class {name!r}: latency_target_ms must be > 0, got {target_ms}"
        )
    return RequestClass(float(weight), target_ms)
