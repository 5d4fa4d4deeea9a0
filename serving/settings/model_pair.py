"""Check that target and draft model belong together, without loading any weight.

Only small JSON files are read. Models named by hub id are looked up in the local cache
and never downloaded; what is not there is reported as skipped.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.settings.checks import METHODS_WITH_DRAFT_MODEL
from serving.settings.cpu_formats import lacks_bfloat16
from serving.settings.finding import Finding
from serving.settings.gguf_conversion import check_room, measure
from serving.settings.gguf_files import GgufError, find_gguf, is_gguf
from serving.settings.gguf_models import folder_for
from serving.settings.model import Settings, is_local_path

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True)
class ModelFiles:
    """The JSON files of one model; None where a file is missing or not cached."""

    name: str
    config: dict[str, Any] | None
    tokenizer: dict[str, Any] | None

    @property
    def vocab_size(self) -> int | None:
        """Rows of the model's output layer."""
        return self._text_config.get("vocab_size")

    @property
    def max_context(self) -> int | None:
        """Positions the model was made for, RoPE scaling included."""
        config = self._text_config
        positions = config.get("max_position_embeddings")
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        original = scaling.get("original_max_position_embeddings")
        if scaling.get("rope_type", scaling.get("type")) == "yarn" and original:
            return max(positions or 0, int(original * scaling.get("factor", 1)))
        return positions

    @property
    def dtype(self) -> str | None:
        """Number format the weights are stored in."""
        config = self._text_config
        return config.get("dtype") or config.get("torch_dtype")

    @property
    def tokenizer_digest(self) -> str | None:
        """Hash of everything that turns text into token ids and back."""
        if self.tokenizer is None:
            return None
        parts = ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")
        relevant = {part: self.tokenizer.get(part) for part in parts}
        text = json.dumps(relevant, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def _text_config(self) -> dict[str, Any]:
        config = self.config or {}
        return {**config, **(config.get("text_config") or {})}


def check_models(settings: Settings) -> list[Finding]:
    """Check both models of a deployment.

    Args:
        settings: The deployment.

    Returns:
        Findings in reading order; at least one. Any with severity `error` means that
        the engine would fail to start or to serve.
    """
    findings: list[Finding] = []
    target = _read_model(settings.model.target, "model.target", findings)
    if target is not None:
        findings.extend(_check_context(target, settings))
        findings.extend(_check_dtype(target, settings))
    if _needs_draft(settings) and settings.model.draft is not None:
        draft = _read_model(settings.model.draft, "model.draft", findings)
        if target is not None and draft is not None:
            findings.extend(_check_pair(target, draft, settings))
    return findings


def _needs_draft(settings: Settings) -> bool:
    return settings.policy.name != "none"


def _read_model(name: str, setting: str, findings: list[Finding]) -> ModelFiles | None:
    if is_gguf(name):
        return _read_converted_model(name, setting, findings)
    if not is_local_path(name):
        return _read_cached_model(name, setting, findings)
    folder = Path(name)
    problem = _folder_problem(folder)
    if problem is not None:
        findings.append(Finding("error", setting, problem))
        return None
    try:
        model = ModelFiles(
            name=name,
            config=_read_json(folder / "config.json"),
            tokenizer=_read_json(folder / "tokenizer.json"),
        )
    except ValueError as error:
        findings.append(Finding("error", setting, f"{error}; copy the model again"))
        return None
    findings.append(Finding("ok", setting, f"found in {folder}"))
    return model


def _read_converted_model(
    name: str, setting: str, findings: list[Finding]
) -> ModelFiles | None:
    try:
        file = find_gguf(name)
        folder = folder_for(file)
        if folder.is_dir():
            return _read_model(str(folder), setting, findings)
        check_room(measure(file), folder)
    except GgufError as error:
        findings.append(Finding("error", setting, str(error)))
        return None
    findings.append(
        Finding("note", setting, f"{file} is converted at the first start, to {folder}")
    )
    return None


def _folder_problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"no such folder: {folder}; set the folder that holds config.json"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json; set the folder of a Hugging Face model"
    if not any(True for pattern in _WEIGHT_PATTERNS for _ in folder.glob(pattern)):
        return f"{folder} has no weights (*.safetensors); download the model first"
    return None


def _read_cached_model(
    name: str, setting: str, findings: list[Finding]
) -> ModelFiles | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        paths = [
            try_to_load_from_cache(name, file)
            for file in ("config.json", "tokenizer.json")
        ]
    except HFValidationError as error:
        findings.append(
            Finding("error", setting, f"not a hub id: {error}; write a folder as ./…")
        )
        return None
    if not isinstance(paths[0], str):
        hint = f"; for the one here write ./{name}" if Path(name).exists() else ""
        findings.append(
            Finding("note", setting, f"{name} is not in the local cache, skipped{hint}")
        )
        return None
    config, tokenizer = (
        _read_json(Path(path)) if isinstance(path, str) else None for path in paths
    )
    findings.append(Finding("ok", setting, f"{name} found in the local cache"))
    return ModelFiles(name=name, config=config, tokenizer=tokenizer)


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


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
    wanted, offered = settings.engine.max_model_len, draft.max_context
    if offered is not None and offered < wanted:
        yield Finding(
            "warning",
            "engine.max_model_len",
            f"the draft model ends at {offered} tokens: requests between that and "
            f"{wanted} run without speculation; lower it to {offered} to avoid that",
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
