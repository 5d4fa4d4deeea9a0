"""Check that target and draft model belong together, without loading any weight.

What cannot be read, of a hub id that is not in the local cache, is reported as skipped.
"""

from collections.abc import Iterator

from serving.engine.gpu.plain_verification import METHODS_ON_TARGETS_POSITIONS
from serving.settings.checks import METHODS_WITH_DRAFT_MODEL
from serving.settings.finding import Finding
from serving.settings.model import Settings
from serving.settings.model_files import ModelFiles, read_model
from serving.settings.number_format import lacks_bfloat16


def check_models(settings: Settings) -> list[Finding]:
    """Check both models of a deployment.

    Args:
        settings: The deployment.

    Returns:
        Findings in reading order; at least one. Any with severity `error` means that
        the engine would fail to start or to serve.
    """
    findings: list[Finding] = []
    target = read_model(settings.model.target, "model.target", findings)
    if target is not None:
        findings.extend(_check_context(target, settings))
        findings.extend(_check_dtype(target, settings))
    if _needs_draft(settings) and settings.model.draft is not None:
        draft = read_model(settings.model.draft, "model.draft", findings)
        if target is not None and draft is not None:
            findings.extend(_check_pair(target, draft, settings))
    return findings


def _needs_draft(settings: Settings) -> bool:
    return settings.policy.name != "none"


def _check_dtype(target: ModelFiles, settings: Settings) -> Iterator[Finding]:
    engine = settings.engine
    if engine.device != "cpu":
        return
    dtype = target.dtype if engine.dtype == "auto" else engine.dtype
    if dtype == "bfloat16" and lacks_bfloat16():
        yield Finding(
            "warning",
            "engine.dtype",
            "this CPU has no instructions for bfloat16, the format of the target; "
            "float32 is faster here and takes twice the memory",
        )


def _check_context(target: ModelFiles, settings: Settings) -> Iterator[Finding]:
    wanted, offered = settings.engine.max_model_len, target.max_context
    if offered is None:
        return
    if wanted > offered:
        yield Finding(
            "error",
            "engine.max_model_len",
            f"must be ≤ {offered}, the target's context (got {wanted})",
        )
    else:
        yield Finding(
            "ok", "engine.max_model_len", f"{wanted} of the target's {offered}"
        )


def _check_pair(
    target: ModelFiles, draft: ModelFiles, settings: Settings
) -> Iterator[Finding]:
    if settings.policy.method in METHODS_WITH_DRAFT_MODEL:
        yield from _check_vocabulary(target, draft, settings)
    if settings.policy.method == "draft_model":
        yield from _check_tokenizer(target, draft)
    yield from _check_draft_context(draft, settings)


def _check_draft_context(draft: ModelFiles, settings: Settings) -> Iterator[Finding]:
    wanted, offered = settings.engine.max_model_len, draft.max_context
    if offered is None or offered >= wanted:
        return
    if settings.engine.device == "cpu":
        yield Finding(
            "warning",
            "engine.max_model_len",
            f"the draft model ends at {offered} tokens: requests between that and "
            f"{wanted} run without speculation; lower it to {offered} to avoid that",
        )
    elif settings.policy.method not in METHODS_ON_TARGETS_POSITIONS:
        yield Finding(
            "error",
            "engine.max_model_len",
            f"must be ≤ {offered}, the draft model's context (got {wanted}): on a GPU "
            "vLLM has it draft for longer requests all the same, at positions that it "
            "has no table for, which can end the engine",
        )


def _check_vocabulary(
    target: ModelFiles, draft: ModelFiles, settings: Settings
) -> Iterator[Finding]:
    if settings.policy.extra.get("use_heterogeneous_vocab"):
        yield Finding("note", "model.draft", "own vocabulary allowed, not compared")
    elif None in (target.vocab_size, draft.vocab_size):
        yield Finding("note", "model.draft", "no vocab_size to compare")
    elif target.vocab_size != draft.vocab_size:
        yield Finding(
            "error",
            "model.draft",
            f"vocabulary of {draft.vocab_size} tokens, the target's has "
            f"{target.vocab_size}; use a draft model of the target's family",
        )
    else:
        yield Finding("ok", "model.draft", f"same vocabulary ({draft.vocab_size})")


def _check_tokenizer(target: ModelFiles, draft: ModelFiles) -> Iterator[Finding]:
    if target.tokenizer_digest is None or draft.tokenizer_digest is None:
        yield Finding("note", "model.draft", "no tokenizer.json to compare")
    elif target.tokenizer_digest == draft.tokenizer_digest:
        yield Finding("ok", "model.draft", "same tokenizer")
    elif _token_ids(target) == _token_ids(draft):
        yield Finding("ok", "model.draft", "same token ids (tokenizer files differ)")
    else:
        yield Finding(
            "error",
            "model.draft",
            "its tokenizer assigns other token ids than the target's; use a draft "
            "model of the target's family",
        )


def _token_ids(model: ModelFiles) -> dict[str, int]:
    tokenizer = model.tokenizer or {}
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = dict(vocab) if isinstance(vocab, dict) else {}
    ids.update({t["content"]: t["id"] for t in tokenizer.get("added_tokens", [])})
    return ids
