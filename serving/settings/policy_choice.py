"""The policy where nobody has named one, and its draft lengths by their present names.

This comes before the settings are checked: what must agree depends on the policy.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from serving.draft_lengths import chooses_depth, read_old_lengths
from serving.settings.finding import Finding
from serving.settings.names import own_name_of

_ABOUT_DRAFTS: Final = frozenset(
    {"method", "draft_tokens", "max_draft_tokens", "extra_draft_tokens"}
)


def complete_policy(data: dict[str, Any]) -> list[Finding]:
    """Fill in the policy's name and replace old names of its lengths.

    Args:
        data: The sections, not checked yet. A new `policy` section is put into it;
            what has no meaning in there is left for the check to find.

    Returns:
        What there is to tell about it.

    Raises:
        ValueError: An old name contradicts a new one.
    """
    policy = data.get("policy", {})
    if not isinstance(policy, dict):
        return []
    own = {own_name_of(name): value for name, value in policy.items()}
    if len(own) < len(policy):
        return []  # Two names of one setting, which the check is about to refuse.
    policy, findings = own, []
    if "name" not in policy:
        policy["name"], reason = _choose(policy, data)
        if reason:
            findings.append(
                Finding("note", "policy.name", f"{policy['name']}: {reason}")
            )
    data["policy"], old_names = read_old_lengths(str(policy["name"]), policy)
    for sentence in old_names:
        name, _, message = sentence.partition(": ")
        findings.append(Finding("warning", f"policy.{name}", message))
    return [*findings, *_idle_lengths(policy)]


def _choose(policy: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, str]:
    """Return a policy and, if it is not `goodput`, why."""
    model, engine = data.get("model"), data.get("engine")
    draft = model.get("draft") if isinstance(model, dict) else None
    if draft is None and not _ABOUT_DRAFTS & policy.keys():
        return "none", "there is no drafter; name one as model.draft"
    if isinstance(engine, dict) and engine.get("device") == "gpu":
        return "fixed", (
            "plain vLLM, for goodput has not been measured on a GPU yet; set "
            "policy.name: goodput to try it"
        )
    return "goodput", ""


def _idle_lengths(policy: Mapping[str, Any]) -> Iterator[Finding]:
    deepest = policy.get("max_draft_tokens")
    if deepest is None:
        return
    if policy["name"] == "fixed":
        yield Finding(
            "warning",
            "policy.max_draft_tokens",
            "has no use for fixed, which drafts policy.draft_tokens; write that",
        )
    if chooses_depth(str(policy["name"])) and policy.get("draft_tokens") is not None:
        yield Finding(
            "note",
            "policy.draft_tokens",
            f"has no use for {policy['name']}, which goes by policy.max_draft_tokens "
            f"({deepest})",
        )
