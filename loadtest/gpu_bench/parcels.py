"""Splits large files into parcels, and joins them where there is no network.

A wheel of vLLM or torch for a GPU is larger than what some machines take in one go.
The pieces may arrive in any order and over several transfers; the manifest goes along
with each.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.engine_bench.errors import BenchError

MANIFEST = "parcels.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """One file in pieces.

    Attributes:
        name: Of the file.
        num_bytes: Its size.
        sha256: Its digest.
        pieces: Names of the pieces, in order.
    """

    name: str
    num_bytes: int
    sha256: str
    pieces: tuple[str, ...]


def split_files(files: Sequence[Path], output: Path, piece_bytes: int) -> list[Parcel]:
    """Cut files into pieces and write the manifest.

    Args:
        files: What to split; no two of the same name.
        output: Folder for pieces and manifest; created if missing.
        piece_bytes: Largest piece.

    Raises:
        BenchError: If a file is missing or two have the same name.
    """
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise BenchError(f"two files of one name among {', '.join(names)}; rename one")
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise BenchError(f"no such file: {', '.join(missing)}")
    output.mkdir(parents=True, exist_ok=True)
    parcels = [_split(file, output, piece_bytes) for file in files]
    text = json.dumps([asdict(parcel) for parcel in parcels], indent=1)
    (output / MANIFEST).write_text(text + "\n")
    return parcels


def plan_loads(
    parcels: Iterable[Parcel], folder: Path, max_bytes: int
) -> list[list[str]]:
    """Group pieces into loads no larger than a transfer takes, first fit first.

    Args:
        parcels: What was split.
        folder: Where the pieces are.
        max_bytes: Of one load; a piece larger than this is a load of its own.

    Returns:
        Names of the pieces of each load.
    """
    loads: list[list[str]] = []
    rooms: list[int] = []
    for parcel in parcels:
        for piece in parcel.pieces:
            size = (folder / piece).stat().st_size
            fitting = (index for index, room in enumerate(rooms) if size <= room)
            index = next(fitting, len(loads))
            if index == len(loads):
                loads.append([])
                rooms.append(max_bytes)
            loads[index].append(piece)
            rooms[index] -= size
    return loads


def read_manifest(folder: Path) -> list[Parcel]:
    """Read what `split_files` wrote.

    Raises:
        BenchError: If there is no manifest.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise BenchError(f"{folder} has no {MANIFEST}; copy it along with the pieces")
    return [
        Parcel(**{**one, "pieces": tuple(one["pieces"])})
        for one in json.loads(file.read_text())
    ]


def find_missing(folder: Path) -> list[str]:
    """Return the pieces that have not arrived yet, joined files left out."""
    return [
        piece
        for parcel in read_manifest(folder)
        if not (folder / parcel.name).is_file()
        for piece in parcel.pieces
        if not (folder / piece).is_file()
    ]


def join_files(folder: Path, output: Path) -> list[Path]:
    """Put the files together again and check them.

    Args:
        folder: Holds manifest and all pieces.
        output: Folder for the files; created if missing.

    Returns:
        The files.

    Raises:
        BenchError: If a piece is missing, or a file is not what it was.
    """
    missing = find_missing(folder)
    if missing:
        raise BenchError(f"{len(missing)} pieces are missing: {', '.join(missing)}")
    output.mkdir(parents=True, exist_ok=True)
    return [_join(parcel, folder, output) for parcel in read_manifest(folder)]


def _split(file: Path, output: Path, piece_bytes: int) -> Parcel:
    digest = hashlib.sha256()
    pieces: list[str] = []
    num_bytes = 0
    with file.open("rb") as source:
        while chunk := source.read(piece_bytes):
            pieces.append(f"{file.name}.{len(pieces):03}")
            (output / pieces[-1]).write_bytes(chunk)
            digest.update(chunk)
            num_bytes += len(chunk)
    return Parcel(file.name, num_bytes, digest.hexdigest(), tuple(pieces))


def _join(parcel: Parcel, folder: Path, output: Path) -> Path:
    file = output / parcel.name
    unfinished = file.with_name(f"{file.name}.unfinished")
    with unfinished.open("wb") as target:
        for piece in parcel.pieces:
            with (folder / piece).open("rb") as source:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
    with unfinished.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != parcel.sha256:
        unfinished.unlink()
        raise BenchError(
            f"{parcel.name} does not come out as it was: a piece was damaged on the "
            "way; copy its pieces again"
        )
    unfinished.rename(file)
    return file
