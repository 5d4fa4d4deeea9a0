"""Names that Ray and vLLM have for what is called otherwise here; both are read."""

from typing import Any, Final

from pydantic import BaseModel

FOREIGN_NAMES: Final[dict[str, dict[str, str]]] = {
    "id": {"served_model_name": "vLLM", "model_id": "Ray Serve LLM"},
    "target": {"model": "vLLM", "model_source": "Ray Serve LLM"},
    "draft_tokens": {"num_speculative_tokens": "vLLM"},
    "draft_sampling": {"draft_sample_method": "vLLM"},
    "per_request_metrics": {"per_request_spec_decode_metrics": "vLLM"},
    "min": {"min_replicas": "Ray Serve"},
    "max": {"max_replicas": "Ray Serve"},
    "start_attempts": {"max_constructor_retry_count": "Ray Serve"},
    "drain_timeout_s": {"graceful_shutdown_timeout_s": "Ray Serve"},
    "metrics_port": {"metrics_export_port": "Ray"},
    "stream_interval_ms": {"stream_batching_interval_ms": "Ray Serve LLM"},
}
"""By our name of the setting: their name, and whose it is. All others are the same."""

_OWN_NAMES: Final = {
    theirs: ours for ours, names in FOREIGN_NAMES.items() for theirs in names
}
_OLD_NAMES: Final = {"extra_draft_tokens": "max_draft_tokens"}


def spellings_of(field: str) -> tuple[str, ...]:
    """Return every name under which a setting is read, ours first."""
    return (field, *FOREIGN_NAMES.get(field, ()))


def own_name_of(name: str) -> str:
    """Return our name of a setting; any other word is returned as it is."""
    return _OWN_NAMES.get(name, name)


def means_the_same(name: str, other: str) -> bool:
    """Tell whether two names stand for one setting, old ones included."""
    own = own_name_of(name), own_name_of(other)
    return len({_OLD_NAMES.get(one, one) for one in own}) == 1


def refuse_two_names(cls: type[BaseModel], data: Any) -> Any:
    """Return a section's data as they are.

    Raises:
        ValueError: A setting is given under two of its names.
    """
    for field in cls.model_fields if isinstance(data, dict) else ():
        given = [name for name in spellings_of(field) if name in data]
        if len(given) > 1:
            raise ValueError(
                f"{given[0]}: is {given[1]} by another name, and both are given; "
                "remove one"
            )
    return data


def allow_old_names(schema: dict[str, Any]) -> None:
    """Let a schema of the policy pass what is still read."""
    schema["properties"]["extra_draft_tokens"] = {
        "type": "integer",
        "minimum": 0,
        "deprecated": True,
        "description": "old: max_draft_tokens - draft_tokens, for tetris",
    }
