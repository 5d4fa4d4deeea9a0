"""The same cell measured by us and by ``vllm bench serve``, a client of other hands.

    python -m loadtest.compare.cross_check --url http://127.0.0.1:8000 \
        --tokenizer configs/models/demo-target --output results/scratch/cross-check

Both send the same prompts to the same server, a number of requests in flight, replies
of equal length (`ignore_eos`), in turn and in changing order. Throughput and the
medians of TTFT and TPOT must agree within `--tolerance`: the whole 95 % interval of
the ratio within a round must lie there. Exits with 1 if it does not, because they
differ or because it cannot be told: then more `--rounds` or `--requests` help.

TPOT is (last - first token) / (tokens - 1) to both, throughput is output tokens over
the time from the first request to the last reply. TTFT ends for us with the first
chunk that carries a part of the reply, for the other client with the first one that
has choices, and that may carry the role alone. Both coincide where a server sends the
role with the first token, as vLLM and ours do; against one that sends it at once the
other client's TTFT is too short, and its TPOT too long.

An API key goes into the variable TETRIS_LOADTEST_HEADER, `NAME: VALUE`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.argument_types import read_positive
from loadtest.client.endpoint import Endpoint
from loadtest.client.errors import LoadTestError
from loadtest.client.records import Records, read_records
from loadtest.environment import describe_machine, describe_piece, describe_versions
from loadtest.load.options import HEADER_VARIABLE, LoadOptions, read_header
from loadtest.load.workloads import make_workload
from loadtest.report.rows import Ratio, compare

from .deployment import read_tail, run_logged
from .locust_process import run_locust

FIGURES = {
    "output_tokens_per_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "tpot_p50_ms": "median_tpot_ms",
}
"""Our names and theirs."""

CLIENTS = ("ours", "theirs")
AGREES, DIFFERS, CANNOT_TELL = "agrees", "DIFFERS", "cannot tell"
_TIMEOUT_S = 1800.0

# The `vllm` command asks for the metadata of a package called vllm, which the build
# for CPUs does not have; its benchmark itself does not. A key is read here, because
# everybody may read arguments.
_BENCH_SERVE = """
import os, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
name, colon, value = os.environ.get("TETRIS_LOADTEST_HEADER", "").partition(":")
header = ["--header", name.strip() + "=" + value.strip()] if colon else []
main(parser.parse_args(sys.argv[1:] + header))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the clients; see the module's words."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare.cross_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--model", default="", help="default: the first one listed")
    add("--tokenizer", default="configs/models/demo-target", metavar="DIR")
    add("--workload", default="mixed")
    add("--in-flight", type=read_positive, default=8, metavar="N")
    add("--requests", type=read_positive, default=192, metavar="N")
    add("--max-tokens", type=read_positive, default=96, metavar="N")
    add("--rounds", type=read_positive, default=10, metavar="N")
    add("--tolerance", type=float, default=0.05, metavar="SHARE")
    add("--output", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(arguments)
    options.output = options.output.absolute()
    options.output.mkdir(parents=True, exist_ok=True)
    options.url = options.url.rstrip("/").removesuffix("/v1")
    header = os.environ.get(HEADER_VARIABLE, "")
    endpoint = Endpoint(options.url, read_header(header))
    try:
        options.model = options.model or endpoint.find_model()
        rounds = [measure_round(options, n + 1) for n in range(options.rounds)]
    except LoadTestError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    ratios = compare_clients(rounds)
    verdicts = {f: judge_ratio(r, options.tolerance) for f, r in ratios.items()}
    written = {
        "environment": {
            "machine": describe_machine(),
            "versions": describe_versions(),
            **describe_piece(),
        },
        "server": {
            "url": options.url,
            "v1/models": json.loads(endpoint.fetch("/v1/models") or "{}"),
        },
        "check": vars(options) | {"output": str(options.output)},
        "rounds": rounds,
        "ratios": {figure: asdict(ratio) for figure, ratio in ratios.items()},
        "verdicts": verdicts,
    }
    (options.output / "cross_check.json").write_text(json.dumps(written, indent=1))
    for figure, ratio in ratios.items():
        interval = f"{ratio.low:.3f}-{ratio.high:.3f}" if ratio.low else "one round"
        sys.stdout.write(
            f"{figure:22} ours / theirs {ratio.ratio:.3f} ({interval})  "
            f"{verdicts[figure]}\n"
        )
    return 0 if set(verdicts.values()) == {AGREES} else 1


def measure_round(options: argparse.Namespace, number: int) -> dict[str, Any]:
    """Measure with both clients, with the order changing from round to round.

    Args:
        options: What to do.
        number: Of the round; decides the prompts.
    """
    prompts = options.output / f"prompts-{number}.jsonl"
    workload, lines = make_workload(options.workload, f"cross-check {number}"), []
    for index in range(options.requests):
        messages = workload.conversation(index).messages
        content = next(m["content"] for m in messages if m["role"] == "user")
        lines.append(json.dumps({"prompt": content}))
    prompts.write_text("\n".join(lines) + "\n")
    measure = {"ours": _measure_ours, "theirs": _measure_theirs}
    order = CLIENTS if number % 2 else CLIENTS[::-1]
    # Both find the same prompts in the server's prefix cache: it has seen them once.
    _measure_ours(options, prompts, number)
    measured = {client: measure[client](options, prompts, number) for client in order}
    sys.stderr.write(f"round {number} {measured}\n")
    return {"round": number, "order": order, **measured}


def compare_clients(rounds: Sequence[dict[str, Any]]) -> dict[str, Ratio]:
    """Return ours over theirs, paired by round, for every figure."""
    return {
        figure: compare(*([one[c][figure] for one in rounds] for c in CLIENTS))
        for figure in FIGURES
    }


def judge_ratio(ratio: Ratio, tolerance: float) -> str:
    """Say whether two clients agree.

    Args:
        ratio: Ours over theirs.
        tolerance: Largest difference from 1.

    Returns:
        `AGREES` where the whole interval lies within the tolerance, `DIFFERS` where
        all of it lies beyond, else `CANNOT_TELL`.
    """
    if ratio.low is None or ratio.high is None:
        return CANNOT_TELL
    if 1 - tolerance <= ratio.low and ratio.high <= 1 + tolerance:
        return AGREES
    is_beyond = ratio.high < 1 - tolerance or ratio.low > 1 + tolerance
    return DIFFERS if is_beyond else CANNOT_TELL


def read_ours(records: Records) -> dict[str, float]:
    """Return our figures under the other client's definitions.

    Raises:
        LoadTestError: If a request failed: then the two did not do the same.
    """
    outcomes = records.outcomes
    failed = [o for o in outcomes if not o.is_ok]
    if failed or not outcomes:
        why = f"{failed[0].failure}: {failed[0].detail}" if failed else "none was sent"
        raise LoadTestError(f"{len(failed)} of our requests failed, e.g. {why}")
    width_s = max(o.end_s for o in outcomes) - min(o.sent_s for o in outcomes)
    return {
        "output_tokens_per_s": sum(o.output_tokens for o in outcomes) / width_s,
        "ttft_p50_ms": float(np.median([o.ttft_ms or 0.0 for o in outcomes])),
        "tpot_p50_ms": float(np.median([o.tpot_ms or 0.0 for o in outcomes])),
        "num_requests": len(outcomes),
    }


def _measure_ours(
    options: argparse.Namespace, prompts: Path, number: int
) -> dict[str, float]:
    records = options.output / "ours.jsonl"
    sent = LoadOptions(
        host=options.url,
        load=f"closed:{options.in_flight}",
        workload=str(prompts),
        model=options.model,
        duration=_TIMEOUT_S,
        requests=options.requests,
        max_tokens=options.max_tokens,
        extra_body=json.dumps({"ignore_eos": True}),
        header=os.environ.get(HEADER_VARIABLE, ""),
        seed=str(number),
        run_id=f"cross-check-{number}",
        records=str(records),
    )
    run_locust(sent, options.output / "ours.log")
    return read_ours(read_records(records))


def _measure_theirs(
    options: argparse.Namespace, prompts: Path, number: int
) -> dict[str, float]:
    result, log = options.output / "theirs.json", options.output / "theirs.log"
    result.unlink(missing_ok=True)
    command = f"""
        --backend openai-chat --endpoint /v1/chat/completions --dataset-name custom
        --num-prompts {options.requests} --max-concurrency {options.in_flight}
        --custom-output-len {options.max_tokens} --temperature 0 --seed {number}
        --ignore-eos --skip-chat-template --disable-tqdm --disable-shuffle
        --save-result --result-filename {result.name}
        """.split()
    command += [f"--base-url={options.url}", f"--model={options.model}"]
    tokenizer = Path(options.tokenizer)
    tokenizer = tokenizer.absolute() if tokenizer.is_dir() else tokenizer
    command += [f"--tokenizer={tokenizer}", f"--dataset-path={prompts}"]
    command += [f"--result-dir={options.output}"]
    with run_logged([sys.executable, "-c", _BENCH_SERVE, *command], log) as process:
        process.wait(_TIMEOUT_S)
    if process.returncode != 0 or not result.exists():
        tail = read_tail(log)
        raise LoadTestError(f"vllm bench serve failed; the end of {log}:\n{tail}")
    found = json.loads(result.read_text())
    if found["completed"] != options.requests:
        raise LoadTestError(f"vllm bench serve completed only {found['completed']}")
    figures = {ours: float(found[theirs]) for ours, theirs in FIGURES.items()}
    return {**figures, "num_requests": found["completed"]}


if __name__ == "__main__":
    sys.exit(main())
