"""Unpacks one GGUF file into a folder of a Hugging Face model, in bfloat16.

    python -m serving.settings.gguf_conversion FILE FOLDER

It says what it does in lines that start with `progress:`, and, before it fails, why in
one that starts with `error:`. `serving.settings.gguf_models` runs it.
"""

import errno
import functools
import math
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Final

from serving.settings.gguf_files import GgufError

_BYTES_PER_WEIGHT: Final = 2
_ROOM_BYTES: Final = 64 << 20
"""For tokenizer and configuration, with something to spare."""

_ELSEWHERE: Final = "free some space, or set TETRIS_CACHE to a folder elsewhere"

_SPLITS_DIGITS: Final = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
)
"""Vocabularies learnt from text with every digit by itself, by llama.cpp's names."""

_SPLITS_AS_GPT2: Final = frozenset({"default", "gpt-2"})


def main() -> int:
    """Convert the file named on the command line; returns the exit code."""
    # Ctrl-C at a terminal reaches both processes; the one that waits for us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        _convert(file, folder)
    except Exception as error:  # GGUF files break the libraries in every possible way.
        _say("error", explain(error, folder))
        return 1
    return 0


@functools.cache
def measure(file: Path) -> int:
    """Return the bytes that a file's weights take once they are unpacked.

    Raises:
        GgufError: The file is broken.
    """
    from transformers.integrations.gguf import GgufHeader

    try:
        header = GgufHeader.from_file(str(file))
    except Exception as error:  # Whatever a wrong length or type leads to.
        raise GgufError(f"{file} is broken: {_one_line(error)}") from None
    ends = (tensor.offset + tensor.nbytes for tensor in header.tensors)
    missing = header.data_start + max(ends, default=0) - file.stat().st_size
    if missing > 0:
        raise GgufError(f"{file} is cut short by {missing} bytes; download it again")
    shapes = (tensor.shape for tensor in header.tensors)
    return _BYTES_PER_WEIGHT * sum(map(math.prod, shapes))


def check_room(num_bytes: int, folder: Path) -> None:
    """Refuse to write weights where there is no room.

    Args:
        num_bytes: Of the weights alone.
        folder: Where they go; it need not exist yet.

    Raises:
        GgufError: The disk has too little left.
    """
    while not folder.exists():
        folder = folder.parent
    free, needed = shutil.disk_usage(folder).free, num_bytes + _ROOM_BYTES
    if free < needed:
        raise GgufError(
            f"{_gb(needed)} are needed in {folder}, where {_gb(free)} are free; "
            f"{_ELSEWHERE}"
        )


def explain(error: Exception, folder: Path) -> str:
    """Say in one line why a conversion failed, and what to do about it.

    Args:
        error: What was raised.
        folder: Where the result was written.
    """
    # safetensors has no errno, only the system's words.
    is_full = getattr(error, "errno", None) == errno.ENOSPC
    if is_full or "(os error 28)" in str(error):
        return f"the disk of {folder.parent} is full; {_ELSEWHERE}"
    return str(error) if isinstance(error, GgufError) else _one_line(error)


def _convert(file: Path, folder: Path) -> None:
    num_bytes = measure(file)
    check_room(num_bytes, folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say("progress", f"unpacking {_gb(num_bytes)} of weights")
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    _say("progress", "writing them")
    model.save_pretrained(folder)
    del model
    _say("progress", "building the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
    _mend_split(tokenizer, file)
    tokenizer.save_pretrained(folder)


def _mend_split(tokenizer: Any, file: Path) -> None:
    """Split text as the vocabulary was learnt, where transformers does not know how.

    Otherwise a blank line before a number, for one, becomes two tokens where the model
    has only ever seen one.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
    )

    _, described, _ = get_gguf_tokenizer(str(file))
    split = described.get("pre_tokenizer_type", "default")
    backend = tokenizer.backend_tokenizer
    if split in _SPLITS_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
        )
    elif split not in _SPLITS_AS_GPT2 | GGUF_PRE_TOKENIZER_SPLITS.keys():
        _say("progress", f"warning: no rule for {split}; text is split as for GPT-2")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _say(kind: str, text: str) -> None:
    sys.stdout.write(f"{kind}: {text}\n")
    sys.stdout.flush()


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
