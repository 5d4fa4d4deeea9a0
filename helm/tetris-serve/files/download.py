"""What the download Job runs: fetch models from a hub into the cache, then say so.

TETRIS_MODELS is a JSON list of hub ids, TETRIS_MARKER the file that workers wait for.
"""

import json
import os
from pathlib import Path

from huggingface_hub import list_repo_files, snapshot_download

# Weights in forms that vLLM does not load where there are safetensors.
_OTHER_WEIGHTS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "original/*"]


def main() -> None:
    """Download; any failure ends the program before the marker is written."""
    for model in json.loads(os.environ["TETRIS_MODELS"]):
        files = list_repo_files(model)
        has_safetensors = any(file.endswith(".safetensors") for file in files)
        folder = snapshot_download(
            model, ignore_patterns=_OTHER_WEIGHTS if has_safetensors else None
        )
        print(f"{model}: {folder}", flush=True)
    Path(os.environ["TETRIS_MARKER"]).touch()


if __name__ == "__main__":
    main()
