"""Shards of chats on the disk: token ids, and who wrote them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

Say = Callable[[str], None]

CHATS_PER_SHARD = 256

_HELD_OUT_EVERY = 16

_NOTE = "target.txt"

_WRITTEN = Path(__file__).parent / "written"
"""Shards that come with the repository, and whose they are."""


class Chat(NamedTuple):
    """One conversation, from its template's first token on.

    `answers` are half-open spans of what the target answered, end token included.
    """

    token_ids: list[int]
    answers: list[tuple[int, int]]
    temperature: float


class WorkDir:
    """The folder of one drafter's data and training."""

    def __init__(self, path: Path, target: Path, method: str = "eagle3") -> None:
        """Open or create it for a target; each method has a checkpoint of its own.

        Raises:
            ValueError: It holds what another target has written.
        """
        self.path = path
        self.checkpoint = path / f"{method}.pt"
        self.curve = path / f"{method}.jsonl"
        self._chats, self._features = path / "chats", path / "features"
        for folder in (self._chats, self._features):
            folder.mkdir(parents=True, exist_ok=True)
        note, digest = path / _NOTE, _digest(target)
        is_its_own = (_WRITTEN / _NOTE).read_text().strip() == digest
        self._written = _find_shards(_WRITTEN) if is_its_own else {}
        if not note.exists():
            note.write_text(digest + "\n")
        elif note.read_text().strip() != digest:
            raise ValueError(
                f"{path} belongs to another target than {target}; "
                "choose another --work-dir"
            )

    def chats_of(self, shard: int) -> Path:
        """Return the file of a shard's chats, which may not exist yet."""
        return self._written.get(shard, self._chats / f"{shard:05}.npz")

    def features_of(self, shard: int) -> Path:
        """Return the file of what the target computes for a shard."""
        return self._features / f"{shard:05}.npy"

    def shards(self) -> list[int]:
        """Return the shards that have been written."""
        return sorted(self._written.keys() | _find_shards(self._chats).keys())

    def ready(self, *, held_out: bool, with_features: bool) -> list[int]:
        """Return the shards of one side of the split, or those that have features."""
        ours = [one for one in self.shards() if is_held_out(one) is held_out]
        return [
            shard
            for shard in ours
            if not with_features or self.features_of(shard).exists()
        ]


def _find_shards(folder: Path) -> dict[int, Path]:
    return {int(file.stem): file for file in folder.glob("*.npz")}


def _digest(target: Path) -> str:
    digest = hashlib.sha256()
    for file in [target / "config.json", *sorted(target.glob("*.safetensors"))]:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def is_held_out(shard: int) -> bool:
    """Tell whether training never sees a shard."""
    return shard % _HELD_OUT_EVERY == 0


def write_shard(file: Path, chats: Sequence[Chat]) -> None:
    """Write chats."""
    token_ids = [token for chat in chats for token in chat.token_ids]
    if max(token_ids, default=0) > np.iinfo(np.uint16).max:
        raise ValueError("the target's vocabulary does not fit into 16 bits")
    answers = [(n, *span) for n, chat in enumerate(chats) for span in chat.answers]
    with replacing(file) as opened:
        np.savez_compressed(
            opened,
            token_ids=np.array(token_ids, np.uint16),
            lengths=np.array([len(chat.token_ids) for chat in chats], np.int32),
            answers=np.array(answers, np.int32).reshape(-1, 3),
            temperatures=np.array([chat.temperature for chat in chats]),
        )


def read_shard(file: Path) -> list[Chat]:
    """Read what :func:`write_shard` has written."""
    with np.load(file) as content:
        # What follows the last end is empty.
        rows = np.split(content["token_ids"], np.cumsum(content["lengths"]))[:-1]
        temperatures = content["temperatures"].tolist()
        parts = zip(rows, temperatures, strict=True)
        chats = [Chat(row.tolist(), [], temperature) for row, temperature in parts]
        for number, begin, end in content["answers"].tolist():
            chats[number].answers.append((begin, end))
    return chats


def cut_by_length(
    chats: Sequence[Chat], numbers: Sequence[int], num_tokens: int
) -> Iterator[list[int]]:
    """Cut numbers of chats into batches of so many tokens, padding included.

    The longest come first; one that is longer stands alone.
    """
    left = sorted(numbers, key=lambda n: -len(chats[n].token_ids))
    while left:
        count = max(1, num_tokens // len(chats[left[0]].token_ids))
        yield left[:count]
        left = left[count:]


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """Open a file that is written whole or not at all."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.partial")
    with unfinished.open("wb") as opened:
        yield opened
    unfinished.replace(file)
