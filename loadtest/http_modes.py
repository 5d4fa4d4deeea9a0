"""What the HTTP path costs: streamed completions at one concurrency, three times.

Speaks to any OpenAI-compatible endpoint, so that server modes can be compared by
starting the server in each and running this:

    python -m loadtest.http_modes --url http://127.0.0.1:8000 --model demo
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Load:
    """One run's requests: random prompts of equal length, answers of equal length."""

    url: str
    model: str
    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    vocab_size: int


@dataclass(frozen=True)
class Timing:
    """One request, in seconds.

    Attributes:
        first_s: Until the first token.
        per_token_s: Mean time of every further token.
    """

    first_s: float
    per_token_s: float


@dataclass(frozen=True)
class Result:
    """One run."""

    output_tokens_per_s: float
    median_ttft_ms: float
    median_tpot_ms: float


async def measure(load: Load, seed: int) -> Result:
    """Send one run's requests and time them.

    Args:
        load: What to send.
        seed: Of the random prompts.

    Returns:
        Throughput over the whole run, and medians over its requests.

    Raises:
        aiohttp.ClientResponseError: The server refused a request.
    """
    draw = random.Random(seed)
    prompts = [
        [draw.randrange(16, load.vocab_size) for _ in range(load.prompt_tokens)]
        for _ in range(load.num_requests)
    ]
    slots = asyncio.Semaphore(load.concurrency)
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=load.concurrency)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        start_s = time.perf_counter()
        timings = await asyncio.gather(
            *(_send(session, load, prompt, slots) for prompt in prompts)
        )
        duration_s = time.perf_counter() - start_s
    return Result(
        output_tokens_per_s=load.num_requests * load.output_tokens / duration_s,
        median_ttft_ms=1000 * statistics.median(t.first_s for t in timings),
        median_tpot_ms=1000 * statistics.median(t.per_token_s for t in timings),
    )


async def _send(
    session: aiohttp.ClientSession,
    load: Load,
    prompt: list[int],
    slots: asyncio.Semaphore,
) -> Timing:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    async with slots:
        start_s = time.perf_counter()
        first_s = None
        async with session.post(f"{load.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                if first_s is None:
                    first_s = time.perf_counter() - start_s
        total_s = time.perf_counter() - start_s
    if first_s is None:
        raise RuntimeError("the server streamed nothing")
    return Timing(first_s, (total_s - first_s) / max(load.output_tokens - 1, 1))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure an endpoint and print one JSON line per run, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--label", default="", help="name of the mode, for the output")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--vocab-size", type=int, default=512)
    args = parser.parse_args(argv)
    load = Load(
        url=args.url,
        model=args.model,
        num_requests=args.requests,
        concurrency=args.concurrency,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        vocab_size=args.vocab_size,
    )
    asyncio.run(measure(load, seed=0))  # Warms caches and connections up.
    results = [asyncio.run(measure(load, seed)) for seed in range(1, args.runs + 1)]
    for result in results:
        _write({"label": args.label, **vars(result)})
    medians = {
        name: statistics.median(getattr(result, name) for result in results)
        for name in vars(results[0])
    }
    _write({"label": args.label, "median_of_runs": args.runs, **medians})
    return 0


def _write(record: dict[str, object]) -> None:
    rounded = {k: round(v, 1) if isinstance(v, float) else v for k, v in record.items()}
    sys.stdout.write(json.dumps(rounded) + "\n")


if __name__ == "__main__":
    sys.exit(main())
