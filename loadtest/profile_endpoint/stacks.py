"""Stacks as py-spy writes them, and what a deployment does in them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_THREAD = re.compile(r"thread \((0x[0-9A-Fa-f]+|\d+)\)(?:: .*)?")
_FRAME = re.compile(r"(?P<function>.*) \((?P<file>.*?)(?::\d+)?\)")

_BENEATH = (
    (
        "drafter",
        r"/vllm/v1/spec_decode/(?!metrics|metadata)|/vllm/v1/worker/gpu/spec_decode/(?!re)"
        r"|/serving/engine/(cold_drafter|speculators_v2)\.py",
    ),
)
"""Own all that they call: the drafter's model is the target's code too."""

_INNERMOST = (
    (
        "event loop",
        r"/asyncio/|-packages/uvloop/|/(selectors|threading)\.py|_event_loop$",
    ),
    (
        "metrics and logs",
        r"-packages/(opentelemetry|prometheus_client|opencensus)/|/logging/__init__\.py"
        r"|/vllm/(v1/metrics|logging_utils)/|/vllm/v1/spec_decode/metrics\.py"
        r"|-packages/ray/(util/metrics|_private/telemetry|_private/metrics)"
        r"|-packages/ray/serve/_private/(metrics_utils|logging_utils|.*_metrics)\.py"
        r"|/serving/(metrics|capacity|tracing)\.py",
    ),
    (
        "serialisation (JSON, pydantic, pickle, msgspec)",
        r"-packages/(pydantic|msgspec|msgpack|orjson|cloudpickle|google/protobuf)/"
        r"|/json/(__init__|encoder|decoder)\.py|/pickle\.py|/vllm/v1/serial_utils\.py"
        r"|-packages/ray/(cloudpickle/|(serve/)?_private/serialization\.py)",
    ),
    ("gRPC", r"-packages/grpc/|_pb2(_grpc)?\.py|/ray/serve/_private/.*grpc.*\.py"),
    (
        "HTTP (uvicorn, starlette, fastapi)",
        r"-packages/(uvicorn|starlette|fastapi|h11|httptools|anyio|httpx|aiohttp)/",
    ),
    ("Ray Serve: proxy", r"-packages/ray/serve/_private/proxy"),
    ("Ray Serve: replica", r"-packages/ray/serve/_private/replica(_response.*)?\.py"),
    (
        "Ray Serve: routing, handles",
        r"-packages/ray/serve/(handle\.py|_private/(router|request_router|replica_result"
        r"|long_poll))",
    ),
    ("Ray Serve: LLM server, ingress", r"-packages/ray/(llm/|serve/llm/)"),
    ("Ray Serve: other", r"-packages/ray/serve/"),
    ("Ray core", r"-packages/ray/"),
    ("ours: policies", r"/policies/\w+\.py"),
    (
        "ours: worker",
        r"/serving/engine/(worker|runner_v|cpu_kernels|plain_steps|profile|step_clock"
        r"|device_|verification_v2|drafter_cache)",
    ),
    ("ours: scheduler", r"/serving/engine/"),
    ("ours: ingress, replica", r"/serving/\w+\.py"),
    (
        "vLLM: OpenAI handlers, chat template",
        r"/vllm/(entrypoints|renderers|parser|tool_parsers|reasoning|inputs)/"
        r"|-packages/jinja2/",
    ),
    (
        "vLLM: tokenising, detokenising",
        r"/vllm/(v1/engine/detokenizer\.py|tokenizers/)"
        r"|-packages/(tokenizers/|transformers/tokenization)",
    ),
    (
        "vLLM: output processing",
        r"/vllm/(v1/engine/(output_processor|logprobs|parallel_sampling)|outputs)\.py",
    ),
    ("vLLM: between front and engine core", r"/vllm/v1/engine/|-packages/zmq/"),
    (
        "vLLM: scheduler, KV cache, grammars",
        r"/vllm/v1/(core|structured_output)/|/vllm/v1/request\.py|-packages/xgrammar/",
    ),
    (
        "sampler",
        r"/vllm/v1/sample/|/vllm/v1/worker/gpu/(sample/|spec_decode/rejection)",
    ),
    (
        "model",
        r"/vllm/(model_executor|compilation|kernels|ir|vllm_flash_attn|v1/attention)/"
        r"|/torchinductor_|<eval_with_key>",
    ),
    ("vLLM: model runner", r"/vllm/v1/(worker|executor)/"),
)
"""Own what they call as far as no frame further in belongs to another; `file:function`
is searched for the first that matches."""

_COMPILED_BENEATH = tuple((name, re.compile(marks)) for name, marks in _BENEATH)
_COMPILED_INNERMOST = tuple((name, re.compile(marks)) for name, marks in _INNERMOST)


@dataclass(frozen=True, slots=True)
class Frame:
    """A call.

    Attributes:
        function: Its name.
        file: Path of the source.
    """

    function: str
    file: str

    def __str__(self) -> str:
        """Return function and file, this from its package on."""
        return (
            f"{self.function} ({_shorten(self.file)})" if self.file else self.function
        )


@dataclass(frozen=True, slots=True)
class Stack:
    """Samples that are alike.

    Attributes:
        thread_id: The kernel's; None if it was not told.
        frames: From the outermost to the innermost.
        num_samples: How many.
    """

    thread_id: int | None
    frames: tuple[Frame, ...]
    num_samples: int


def read_stacks(lines: Iterable[str]) -> Iterator[Stack]:
    """Read py-spy's raw format: frames joined by `;`, a space, a number of samples."""
    for line in lines:
        text, _, count = line.strip().rpartition(" ")
        if not text:
            continue
        thread_id: int | None = None
        frames = []
        for part in text.split(";"):
            if (thread := _THREAD.fullmatch(part)) is not None:
                thread_id = int(thread[1], 0)
            elif (frame := _FRAME.fullmatch(part)) is not None:
                frames.append(Frame(frame["function"], frame["file"]))
            else:
                frames.append(Frame(part, ""))
        yield Stack(thread_id, tuple(frames), int(count))


def group_of(frames: Sequence[Frame]) -> str:
    """Return what a process does in a stack.

    Args:
        frames: From the outermost to the innermost; at least one.

    Returns:
        A name from the tables above, or `other: PACKAGE` of the innermost frame.
    """
    for name, marks in _COMPILED_BENEATH:
        if any(marks.search(frame.file) for frame in frames):
            return name
    for frame in reversed(frames):
        for name, marks in _COMPILED_INNERMOST:
            if marks.search(f"{frame.file}:{frame.function}"):
                return name
    return f"other: {_package(frames[-1].file)}"


def _shorten(file: str) -> str:
    """Return a path without the folder that its package is in."""
    for mark in ("-packages/", "/lib/python"):
        _, found, rest = file.rpartition(mark)
        if found:
            return rest if mark == "-packages/" else rest.partition("/")[2]
    return "/".join(file.split("/")[-3:])


def _package(file: str) -> str:
    """Return the package of a file; its name alone outside of all packages."""
    if "-packages/" in file:
        return _shorten(file).partition("/")[0].removesuffix(".py")
    return "standard library" if "/lib/python" in file else file.rpartition("/")[2]
