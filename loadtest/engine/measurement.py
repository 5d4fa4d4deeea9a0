"""From a loop's record to figures."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from .closed_loop import LoopRecord


def measure(record: LoopRecord) -> dict[str, Any]:
    """Compute what the requests saw in the steady part.

    Returns:
        Plain values. `acceptance_length` is tokens per target pass of a decoding
        request, the bonus token included: 1 without speculation. Inter-token latency
        is the time between two deliveries to a request; one delivery may carry
        several tokens. `time_per_token_p50_ms` is the median over requests of their
        decoding time per token.
    """
    start_s, end_s = record.start_s, record.end_s
    num_tokens = num_decode_tokens = num_passes = num_steps = 0
    gaps: list[float] = []
    last_s: dict[int, float] = {}
    decode: dict[int, tuple[float, int]] = {}
    for step in record.steps:
        steady = start_s < step.end_s <= end_s
        num_steps += steady
        for delivery in step.deliveries:
            count = len(delivery.token_ids)
            if count == 0:
                continue
            before_s = last_s.get(delivery.index)
            last_s[delivery.index] = step.end_s
            if not steady:
                continue
            num_tokens += count
            if before_s is None:
                continue  # The prompt's own pass yields the first token.
            gap = step.end_s - before_s
            gaps.append(gap)
            num_decode_tokens += count
            num_passes += 1
            spent, made = decode.get(delivery.index, (0.0, 0))
            decode[delivery.index] = (spent + gap, made + count)
    window_s = end_s - start_s
    per_token = [spent / made for spent, made in decode.values()]
    return {
        "window_s": window_s,
        "num_steps": num_steps,
        "num_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / window_s,
        "acceptance_length": num_decode_tokens / num_passes if num_passes else None,
        "itl_p50_ms": _percentile_ms(gaps, 50),
        "itl_p99_ms": _percentile_ms(gaps, 99),
        "time_per_token_p50_ms": _percentile_ms(per_token, 50),
        "phases": _phases(record),
    }


def digest_outputs(record: LoopRecord) -> tuple[int, list[str]]:
    """Return the number of output tokens of all requests and a digest of each one."""
    outputs: dict[int, array[int]] = {}
    for step in record.steps:
        for delivery in step.deliveries:
            outputs.setdefault(delivery.index, array("q")).extend(delivery.token_ids)
    digests = [
        hashlib.blake2b(outputs[index].tobytes(), digest_size=6).hexdigest()
        for index in sorted(outputs)
    ]
    return sum(map(len, outputs.values())), digests


def _phases(record: LoopRecord) -> dict[str, float] | None:
    """Return tokens per second before and after conditions changed."""
    switch_s = record.switch_s
    if switch_s is None or not record.start_s < switch_s < record.end_s:
        return None
    return {
        "before": _tokens_per_s(record, record.start_s, switch_s),
        "after": _tokens_per_s(record, switch_s, record.end_s),
    }


def _tokens_per_s(record: LoopRecord, start_s: float, end_s: float) -> float:
    tokens = sum(
        len(delivery.token_ids)
        for step in record.steps
        if start_s < step.end_s <= end_s
        for delivery in step.deliveries
    )
    return tokens / (end_s - start_s)


def _percentile_ms(seconds: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(seconds, percent)) * 1e3 if seconds else None
