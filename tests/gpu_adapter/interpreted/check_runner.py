"""The V2 runner with our parts: right tokens, whatever is asked, and no waiting.

Reading a tensor's value makes the host wait for the device on a GPU. Here every
operation of whole steps is watched: what reads one, or whose result has a size that
only the values know, and who asked.
"""

import re
import sys
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import serving
from serving.engine.gpu import verification as verification_v2
from serving.engine.gpu.clock import DeviceClock
from serving.engine.gpu.copy import PendingCopy
from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.speculators import RawConfidence
from serving.engine.gpu.verification import PlannedVerification
from tests.engine.checks import (
    Arrival,
    check_logprobs,
    draw_prompts,
    greedy,
    summarize_all,
)
from tests.engine.made_up import make_up_costs, plan_instead
from tests.gpu_adapter.interpreted import graphs, plugin
from tests.gpu_adapter.interpreted.engines import MAX_NUM_SEQS, run_interpreted

PROMPTS = draw_prompts(6)
PARAMS = greedy(16)

# They join one after the other, more than run at once.
ARRIVALS = [
    Arrival(str(number), prompt, greedy(10 + 3 * (number % 4)), step=number // 2)
    for number, prompt in enumerate(draw_prompts(12))
]

PATTERN = r"([a-e]{2}[0-9]){3,}"

DEPTH = 4


@pytest.fixture(scope="module")
def plain(pair):
    """VLLM's V2 runner without drafts."""
    with run_interpreted(pair[0], skip_tokenizer_init=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def with_drafts(pair, plain):
    args = {"policy": "tetris", "skip_tokenizer_init": False}
    with run_interpreted(*pair, **args) as engine:
        yield engine


@pytest.fixture
def ours(with_drafts):
    with_drafts.set_policy("tetris", draft_tokens=2, max_draft_tokens=DEPTH)
    return with_drafts


@pytest.fixture(scope="module")
def expected(plain):
    return plain.answer(PROMPTS, PARAMS)


@pytest.fixture(scope="module")
def driven(plain):
    return plain.drive(ARRIVALS)


@pytest.mark.parametrize(
    ("policy", "draft_tokens"),
    [("fixed", 3), ("tetris", 2), ("dynamic", 4), ("goodput", 4)],
)
def test_tokens_are_those_without_speculation(
    policy, draft_tokens, driven, with_drafts
):
    engine = with_drafts
    engine.set_policy(policy, draft_tokens=draft_tokens, max_draft_tokens=DEPTH)
    if policy in ("dynamic", "goodput"):
        make_up_costs(engine)
    assert isinstance(engine.runner, TetrisGPUModelRunner)
    assert isinstance(engine.runner.adaptive_verification, PlannedVerification)
    captured = engine.runner.cudagraph_manager.graphs.values()
    num_replays = sum(graph.num_replays for graph in captured)
    assert engine.drive(ARRIVALS) == driven
    engine.check_counters()
    counters = engine.counters
    assert counters.num_accepted_tokens > len(ARRIVALS)
    assert (counters.num_cut_tokens["budget"] > 0) == (policy in ("tetris", "goodput"))
    assert sum(graph.num_replays for graph in captured) > num_replays
    # Confidence is what the drafter says itself, and stays so.
    estimator = engine.runner.speculator.acceptance_estimator
    assert isinstance(estimator, RawConfidence)
    assert (estimator.slope.item(), estimator.intercepts.any().item()) == (1.0, False)


def test_other_settings_change_no_token(plain, ours):
    """Log probabilities are the target's own, and a grammar is followed."""
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=PATTERN)
    params = [
        greedy(18, structured_outputs=grammar, ignore_eos=False, detokenize=True),
        greedy(16, logprobs=3),
        greedy(16, extra_args={"speculative_decoding": "off"}),
        greedy(16, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(16, min_tokens=5, stop_token_ids=list(range(3, 20)), ignore_eos=False),
        greedy(16, allowed_token_ids=list(range(10, 40))),
        greedy(1),
    ]
    prompts = draw_prompts(len(params))
    outputs, others = (one.complete(prompts, params) for one in (ours, plain))
    assert summarize_all(outputs) == summarize_all(others)
    assert re.fullmatch(r"([a-e]{2}[0-9])*[a-e]{0,2}", outputs[0].outputs[0].text)
    check_logprobs(*(one[1].outputs[0].logprobs for one in (outputs, others)))
    ours.check_counters()
    counters = ours.counters
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["opt_out"] > 0
    assert counters.num_cut_tokens["length"] > 0


@pytest.mark.parametrize("reason", ["attention_backend", "eager"])
def test_obstacles_lead_to_plain_verification(reason, pair, expected, monkeypatch):
    """Not to a refusal to start, as vLLM's own adaptive verification does."""
    if reason == "attention_backend":
        # The CPU's has no graphs, left as it is.
        builder = graphs.CPUAttentionMetadataBuilder
        never = graphs.AttentionCGSupport.NEVER
        monkeypatch.setattr(builder, "_cudagraph_support", never)
    else:
        monkeypatch.setattr(plugin, "graphs_wanted", graphs.CUDAGraphMode.NONE)
    with run_interpreted(*pair, policy="tetris") as engine:
        assert engine.runner.adaptive_verification is None
        assert engine.answer(PROMPTS, PARAMS) == expected
        counters = engine.counters
    assert counters.num_fallbacks[f"plain_{reason}"] > 0
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] == 0


def test_a_draft_model_makes_as_many_passes_as_asked_for(ours, expected, monkeypatch):
    """VLLM's makes all of them; and each step's times tell of what was made."""
    drafter, made = ours.runner.speculator, set()
    timings = ours.draft_at(cycle([4, 1, 3, 0, 2]))
    go_on = drafter._multi_step_decode

    def note(*args, **kwargs):
        made.add(drafter.num_speculative_steps)
        return go_on(*args, **kwargs)

    monkeypatch.setattr(drafter, "_multi_step_decode", note)
    assert ours.answer(PROMPTS, PARAMS) == expected
    assert made == {2, 3, 4}
    assert drafter.num_speculative_steps == DEPTH
    assert {timing.depth for timing in timings} == {0, 1, 2, 3, 4}
    assert all(one.target_ms > 0 and one.draft_first_ms > 0 for one in timings)
    assert all((one.draft_next_ms > 0) == (one.depth > 1) for one in timings)


def test_every_batch_is_padded_to_the_next_captured_size(with_drafts):
    """As the planner prices it."""
    manager = with_drafts.runner.cudagraph_manager
    load = {"uniform_token_count": None, "num_active_loras": 0}
    load["max_query_len"] = DEPTH + 1
    for num_tokens in range(1, graphs.CAPTURED_TOKENS[-1] + 2):
        sizes = [size for size in graphs.CAPTURED_TOKENS if size >= num_tokens]
        found = manager.dispatch(min(MAX_NUM_SEQS, num_tokens), num_tokens, **load)
        assert found.num_tokens == (sizes[0] if sizes else num_tokens)
        assert (found.cg_mode == graphs.CUDAGraphMode.FULL) == bool(sizes)


def test_the_start_up_profile_reaches_the_planner_once(with_drafts):
    with_drafts.set_policy("goodput", max_draft_tokens=DEPTH)
    with_drafts.runner._profile_sent = False
    scheduler, profiles = with_drafts.scheduler, []
    planner = scheduler._planner
    plan_instead(scheduler, fit_profile=profiles.append)
    with_drafts.complete(PROMPTS, greedy(32))
    (profile,) = profiles
    # Every captured size, and some beyond.
    assert set(graphs.CAPTURED_TOKENS) < set(profile.num_tokens)
    assert planner.cost.num_steps > 10
    assert scheduler.snapshot()["planner"]["calibration_error"] >= 0


@pytest.mark.parametrize(
    ("part", "method"), [(DeviceClock, "read_finished"), (PendingCopy, "read")]
)
def test_a_report_that_cannot_be_made_costs_no_token_and_is_counted(
    part, method, ours, expected, monkeypatch
):
    with monkeypatch.context() as broken:
        broken.setattr(part, method, lambda *_: 1 / 0)
        assert ours.answer(PROMPTS[:3], PARAMS) == expected[:3]
    # Where there was none, the next one tells.
    assert ours.answer(PROMPTS[:3], PARAMS) == expected[:3]
    assert ours.counters.num_fallbacks.keys() == {"report_error"}


OURS = [Path(serving.__file__).parents[1] / part for part in ("serving", "policies")]

READING = "item _local_scalar_dense is_nonzero equal nonzero masked_select"
READS = {getattr(torch.ops.aten, name).default for name in READING.split()}
READS.add(torch.ops.aten.repeat_interleave.Tensor)


class Watch(TorchDispatchMode):
    """Notes which functions of ours read values."""

    def __init__(self):
        super().__init__()
        self.num_operations = 0
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        # How many rows an index with a mask takes, only the mask knows.
        has_mask = func is torch.ops.aten.index.Tensor and any(
            one is not None and one.dtype == torch.bool for one in args[1]
        )
        if (func in READS or has_mask) and (place := find_reader()):
            self.places.add(place)
        return func(*args, **(kwargs or {}))


def find_reader():
    """Return the function that asked, if the nearest outside of torch is ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts:
            is_ours = any(path.is_relative_to(folder) for folder in OURS)
            return f"{path.stem}.{frame.f_code.co_name}" if is_ours else None
        frame = frame.f_back
    return None


def run_steps(engine, monkeypatch, num_tokens):
    """Watch what the runner does from a step's schedule to its last draft."""
    watch, runner = Watch(), engine.runner

    def watched(method):
        def call(*args, **kwargs):
            with watch:
                return method(*args, **kwargs)

        return call

    def noted(method):
        def call(*args, **kwargs):
            if place := find_reader():
                watch.places.add(place)
            return method(*args, **kwargs)

        return call

    for name in ("execute_model", "sample_tokens"):
        monkeypatch.setattr(runner, name, watched(getattr(runner, name)))
    # On a CPU these are no operations.
    for name in ("tolist", "numpy", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
    engine.complete(draw_prompts(4), greedy(num_tokens))
    assert watch.num_operations > 1000
    # Where the tensors of `DeviceReader.start` are the CPU's.
    return watch.places - {"copy.<genexpr>"}


def test_no_step_reads_a_value(ours, monkeypatch):
    assert run_steps(ours, monkeypatch, 16) == set()


def test_a_step_that_does_is_found(ours, monkeypatch):
    write_totals = verification_v2._write_totals

    def write_and_read(lengths, out):
        write_totals(lengths, out)
        assert int(out[-1]) >= 0

    code = write_and_read.__code__.replace(co_filename=verification_v2.__file__)
    write_and_read.__code__ = code
    monkeypatch.setattr(verification_v2, "_write_totals", write_and_read)
    assert run_steps(ours, monkeypatch, 6) == {"verification.write_and_read"}
