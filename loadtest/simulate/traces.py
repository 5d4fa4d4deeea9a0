"""Recorded loads in their public formats: when requests came, and how long they were.

Azure, `AzureLLMInferenceTrace_{conv,code}.csv` of
github.com/Azure/AzurePublicDataset/tree/master/data; Mooncake, `*.jsonl` of
github.com/kvcache-ai/Mooncake/tree/main/FAST25-release/traces; BurstGPT, `*.csv` of
github.com/HPMLL/BurstGPT/releases. `samples` has made-up ones of each form.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from .drawn import Drawn

MOONCAKE_TOKENS = 512
"""Of the blocks that Mooncake's `hash_ids` name."""

Row = tuple[float, int, int, Sequence[int]]


def _read_azure(row: Mapping[str, str]) -> Row:
    when_s = datetime.fromisoformat(row["TIMESTAMP"]).replace(tzinfo=UTC).timestamp()
    return when_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _read_burstgpt(row: Mapping[str, str]) -> Row:
    tokens = int(row["Request tokens"]), int(row["Response tokens"])
    return float(row["Timestamp"]), *tokens, ()


def _read_mooncake(row: Mapping[str, Any]) -> Row:
    tokens = int(row["input_length"]), int(row["output_length"])
    whole = tokens[0] // MOONCAKE_TOKENS
    return float(row["timestamp"]) / 1e3, *tokens, row.get("hash_ids", ())[:whole]


_BY_COLUMN: Mapping[str, Callable[[Mapping[str, Any]], Row]] = {
    "ContextTokens": _read_azure,
    "Request tokens": _read_burstgpt,
    "input_length": _read_mooncake,
}


def write_azure(path: Path, num_requests: int) -> None:
    """Write a made-up trace in Azure's form: bursts, and prompts longer than replies.

    The rate is redrawn every 10 s, half of its logarithm staying: a sixth of the time
    it is half again its mean or more. Lengths are lognormal, of means 1,150 and 210.
    """
    rng = np.random.default_rng(0)
    logs = [0.0]
    while len(logs) < 121:
        logs.append(0.5 * logs[-1] + rng.normal(0.0, 0.5))
    counts = rng.multinomial(num_requests, np.exp(logs) / np.exp(logs).sum())
    spans = np.repeat(np.arange(len(logs)), counts)
    arrival_s = np.sort(10.0 * (spans + rng.random(num_requests)))
    prompt, reply = (
        np.maximum(1, rng.lognormal(np.log(mean) - 0.35, 0.83, num_requests))
        for mean in (1150, 210)
    )
    when = np.datetime64("2026-01-01") + np.rint(1e6 * arrival_s).astype("m8[us]")
    rows = zip(when, prompt.astype(int), reply.astype(int), strict=True)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [",".join(map(str, row)) for row in rows]
    path.write_text("\n".join(lines), "utf-8")


@cache
def read_trace(path: Path) -> Drawn:
    """Read a trace of any of the three forms, told apart by their columns.

    Times begin at 0, and all requests are of the first kind. Replies without a token,
    which BurstGPT has of requests that failed, are left out. Of prompts whole blocks
    have names.

    Raises:
        ValueError: If it is none of them, naming the line.
    """
    number, rows = 0, []
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            entries: Iterable[Mapping[str, Any]] = (
                map(json.loads, filter(str.strip, lines))
                if path.suffix == ".jsonl"
                else csv.DictReader(lines)
            )
            for number, entry in enumerate(entries, start=1):  # noqa: B007 - named below
                read = next(_BY_COLUMN[one] for one in _BY_COLUMN if one in entry)
                row = read(entry)
                if row[2] > 0:
                    rows.append(row)
    except (KeyError, TypeError, ValueError, StopIteration, OSError) as error:
        raise ValueError(
            f"{path}: request {number} is of no form of Azure, Mooncake or BurstGPT "
            f"({type(error).__name__}: {error})"
        ) from error
    if len(rows) < 2:
        raise ValueError(f"{path}: {len(rows)} requests are no load")
    when, prompt, output, chains = zip(*sorted(rows, key=itemgetter(0)), strict=True)
    arrival_s = np.array(when, dtype=np.float64)
    blocks = np.array([*chain.from_iterable(chains)], np.int64)
    return Drawn(
        arrival_s - arrival_s[0],
        np.maximum(1, np.array(prompt, dtype=np.int64)),
        np.array(output, dtype=np.int64),
        kind=np.zeros(arrival_s.size, np.int64),
        chain=np.unique(blocks, return_inverse=True)[1],
        chain_first=np.cumsum([0, *map(len, chains)]),
        block_tokens=MOONCAKE_TOKENS,
    )
