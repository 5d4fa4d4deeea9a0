"""Draft lengths by name, in settings and in vLLM's configuration alike.

`draft_tokens` is a fixed length, what `fixed` verifies of every request and `tetris` of
every request on average; `max_draft_tokens` is the depth that policies choose within.
`draft_tokens` used to mean both, and `tetris` used to go `extra_draft_tokens` deeper.
"""

from collections.abc import Mapping
from typing import Any, Final

DRAFT_TOKENS: Final = 3
"""Without a number: what is verified per request."""

MAX_DRAFT_TOKENS: Final = 8
"""Without a number: the depth to choose within."""

TETRIS_MARGIN: Final = 2
"""Without a number: how much deeper than it verifies `tetris` drafts, in every step."""

_NEW, _OLD = "max_draft_tokens", "extra_draft_tokens"


def chooses_depth(policy: str) -> bool:
    """Tell whether a policy, ours or somebody's own, chooses how deep to draft."""
    return policy not in {"none", "fixed", "tetris"}


def read_old_lengths(
    policy: str, given: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Put the present names in the place of old ones.

    Args:
        policy: Its name.
        given: Settings of the policy, old names among them; unchanged.

    Returns:
        The settings by their present names, and a sentence for each that was not,
        starting with the old name.

    Raises:
        ValueError: Both names of one setting were given, or a length is no number.
    """
    lengths, sentences = dict(given), []
    if lengths.get(_OLD) is not None and policy == "tetris":
        if lengths.get(_NEW) is not None:
            raise ValueError(f"{_OLD}: is given beside {_NEW}, its new form; remove it")
        try:
            own = int(lengths.get("draft_tokens", DRAFT_TOKENS))
            lengths[_NEW] = own + int(lengths[_OLD])
        except (TypeError, ValueError):
            raise ValueError(
                f"{_OLD}: must be a number, as draft_tokens (got {lengths[_OLD]!r})"
            ) from None
        sentences.append(f"{_OLD}: is an old name; write {_NEW}: {lengths[_NEW]}")
    lengths.pop(_OLD, None)
    if chooses_depth(policy) and lengths.get("draft_tokens") is not None:
        own = lengths.pop("draft_tokens")
        if lengths.get(_NEW) is None:
            lengths[_NEW] = own
            sentences.append(
                f"draft_tokens: is a fixed length; for {policy} write {_NEW}: {own}"
            )
    return lengths, sentences
