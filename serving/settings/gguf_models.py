"""Models in GGUF files, converted once into folders that vLLM can serve.

vLLM wants a folder of safetensors. So the first start converts (by
`gguf_conversion`, in a process of its own, which gives its memory back), and
later ones only compare digests. A folder's name holds the digest of what it was made
from: another file, or another converter, is another folder.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from serving.settings.gguf_files import GgufError, find_gguf, gguf_files_of
from serving.settings.model import Settings, SettingsError, read_cache_dir

MANIFEST: Final = "tetris-gguf.json"
"""Holds the SHA-256 of every other file in a converted folder, by its name."""

_CONVERTER_VERSION: Final = 1

Say = Callable[[str], None]


def with_converted_models(settings: Settings, say: Say) -> Settings:
    """Put the folders of converted models in the place of GGUF files.

    Args:
        settings: The deployment; without a GGUF file it is returned as it is.
        say: Takes lines about the progress.

    Raises:
        SettingsError: A file is missing, broken or of an unknown kind, or there is no
            room for what is made of it.
    """
    folders = {}
    for field, name in gguf_files_of(settings.model).items():
        try:
            folders[field] = str(convert(find_gguf(name), say))
        except GgufError as error:
            raise SettingsError([f"model.{field}: {error}"]) from error
    if not folders:
        return settings
    model = settings.model.model_copy(update=folders)
    return settings.model_copy(update={"model": model})


def folder_for(file: Path) -> Path:
    """Return the folder that a file is converted into, which may not exist yet."""
    transformers = importlib.metadata.version("transformers")
    recipe = f"{_digest(file)} {transformers} {_CONVERTER_VERSION}"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    return read_cache_dir() / "models" / f"{file.stem}-{key}"


def is_whole(folder: Path) -> bool:
    """Tell whether a converted folder is there with every file as it was written."""
    try:
        digests = json.loads((folder / MANIFEST).read_text("utf-8"))
        return bool(digests) and all(
            _digest(folder / name) == digests[name] for name in digests
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def convert(file: Path, say: Say) -> Path:
    """Return the folder converted from a file; convert if it is missing or damaged.

    Starts at the same time wait for each other. An interruption leaves nothing that
    could be taken for a model.

    Raises:
        GgufError: It cannot be converted.
    """
    folder = folder_for(file)
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder, say):
            if is_whole(folder):
                return folder
            _discard(folder, say)
            say(f"converting {file.name} ({_mb(file)}), once")
            unfinished = Path(
                tempfile.mkdtemp(".unfinished", f"{folder.name}.", folder.parent)
            )
            try:
                _run_converter(file, unfinished, say)
                _seal(unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise GgufError(
            f"cannot write to {folder.parent}: {error.strerror}; set TETRIS_CACHE to "
            "another folder"
        ) from error
    say(f"converted into {folder}")
    return folder


def convert_alike(name: str, folder: str, say: Say) -> None:
    """Make the folder that another machine has, on this one.

    Raises:
        GgufError: It cannot be converted, or not into that folder.
    """
    own = convert(find_gguf(name), say)
    if own != Path(folder):
        raise GgufError(
            f"{name} is {own} on this machine and {folder} where the deployment was "
            "built; install the same packages and set the same TETRIS_CACHE on both"
        )


@contextlib.contextmanager
def _only_one(folder: Path, say: Say) -> Iterator[None]:
    # Not inside the folder, which is replaced; never removed, or two could hold it.
    with Path(f"{folder}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another start that converts {folder.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(folder: Path, say: Say) -> None:
    """Remove what an interrupted conversion, or a damaged disk, has left."""
    if folder.exists():
        say(f"{folder} is damaged and is made anew")
        shutil.rmtree(folder)
    for unfinished in folder.parent.glob(f"{folder.name}.*.unfinished"):
        shutil.rmtree(unfinished, ignore_errors=True)


def _run_converter(file: Path, folder: Path, say: Say) -> None:
    command = [
        *(sys.executable, "-P", "-m", "serving.settings.gguf_conversion"),
        *(str(file), str(folder)),
    ]
    # A progress bar is for people; in a log it would be a page of its own.
    quiet = {} if sys.stderr.isatty() else {"TQDM_DISABLE": "1"}
    env = {**os.environ, **quiet, "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    reason = "it ended without a word"
    try:
        for line in process.stdout:
            kind, _, text = line.rstrip("\n").partition(": ")
            if kind == "error":
                reason = text
            elif kind == "progress":
                say(text)
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status < 0:
        reason = f"it was ended by signal {-status}, maybe for want of memory"
    if status:
        raise GgufError(f"{file} cannot be converted: {reason}")


def _seal(folder: Path) -> None:
    digests = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(digests, indent=2) + "\n", "utf-8")
    # Temporary files and folders are their maker's alone; a cache may be shared.
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o755)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _mb(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.0f} MB"
