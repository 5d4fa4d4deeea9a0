"""What the download Job runs: put models into the cache, then say so.

TETRIS_MODELS is a JSON list of hub ids, and of GGUF files to convert, in packages of
this image or in the cache. TETRIS_MARKER is the file that others wait for.
"""

import functools
import json
import os
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

from serving.settings.gguf_files import find_gguf, is_gguf
from serving.settings.gguf_models import convert

# Weights in forms that vLLM does not load where there are safetensors.
_OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "original/*"]

_say = functools.partial(print, flush=True)


def main() -> None:
    """Fetch all; any failure ends the program before the marker is written."""
    for model in json.loads(os.environ["TETRIS_MODELS"]):
        fetch = _convert if is_gguf(model) else _download
        _say(f"{model}: {fetch(model)}")
    Path(os.environ["TETRIS_MARKER"]).touch()


def _download(model: str) -> str:
    files = list_repo_files(model)
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    ignored = _OTHER_WEIGHTS if has_safetensors else None
    return str(snapshot_download(model, ignore_patterns=ignored))


def _convert(model: str) -> Path:
    return convert(find_gguf(model), _say)


if __name__ == "__main__":
    main()
