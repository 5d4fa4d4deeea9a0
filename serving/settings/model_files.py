"""What the small JSON files of a model say, without loading any weight.

Models named by hub id are looked up in the local cache and never downloaded.
"""

import contextlib
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.settings.finding import Finding
from serving.settings.gguf_conversion import check_room, measure
from serving.settings.gguf_files import GgufError, find_gguf, is_gguf
from serving.settings.gguf_models import folder_for
from serving.settings.model import is_local_path

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
    def kv_token_bytes(self) -> int | None:
        """What a token takes in the KV cache; None for models of an unknown shape."""
        with contextlib.suppress(KeyError, TypeError, ZeroDivisionError):
            text = self._text_config
            num_heads = text["num_attention_heads"]
            size = text.get("head_dim") or text["hidden_size"] // num_heads
            num_kv_heads = text.get("num_key_value_heads") or num_heads
            # Keys and values.
            width = 2 * (4 if "32" in str(self.dtype) else 2)
            parts = (text["num_hidden_layers"], num_kv_heads, size, width)
            if all(type(part) is int and part > 0 for part in parts):
                return math.prod(parts)
        return None

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


def read_model(name: str, setting: str, findings: list[Finding]) -> ModelFiles | None:
    """Read a model's files.

    Args:
        name: Its folder, GGUF file or hub id.
        setting: What names it, for `findings`.
        findings: Is told what was found, and what is missing.

    Returns:
        None where there is nothing to read, or not yet.
    """
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
            return read_model(str(folder), setting, findings)
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


def weigh_model(name: str, dtype: str = "auto") -> int:
    """Return the bytes of a model's weights in a number format; 0 if nobody knows."""
    stored = _weigh_files(name)
    model = read_model(name, "", []) if dtype == "float32" and stored else None
    is_wide = model is None or "32" in str(model.dtype)
    return stored if is_wide else 2 * stored


def _weigh_files(name: str) -> int:
    if is_gguf(name):
        # What is wrong with the file is the models' finding.
        with contextlib.suppress(GgufError):
            return measure(find_gguf(name))
    if not is_local_path(name):
        return 0
    return sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
