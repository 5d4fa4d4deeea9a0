"""The V2 runner with our parts: right tokens, whatever is asked, and no waiting.

Reading a tensor's value makes the host wait for the device on a GPU. Here every
operation of whole steps is watched: what reads one, or whose result has a size that
only the values know, and who asked. `test_plain_verification` reads the source for
calls that bypass operations (`tolist`, `numpy`).
"""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import serving
from policies.goodput import GoodputPlanner
from serving.engine.gpu import verification as verification_v2
from serving.engine.gpu.runner import TetrisGPUModelRunner
from serving.engine.gpu.verification import PlannedVerification
from tests.engine.checks import (
    Arrival,
    check_counters,
    complete,
    draw_prompts,
    drive,
    greedy,
    summarize_all,
    summarize_by_name,
)
from tests.engine.made_up import make_up_costs
from tests.gpu_adapter.interpreted import graphs, plugin
from tests.gpu_adapter.interpreted.engines import run_interpreted

PROMPTS = draw_prompts(6)

PATTERN = r"([a-e]{2}[0-9]){3,}"

TETRIS = {"draft_tokens": 2, "max_draft_tokens": 4}


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
    with_drafts.set_policy("tetris", **TETRIS)
    return with_drafts


@pytest.mark.parametrize(
    ("policy", "draft_tokens"),
    [("fixed", 3), ("tetris", 2), ("dynamic", 4), ("goodput", 4)],
)
def test_tokens_are_those_without_speculation(policy, draft_tokens, plain, with_drafts):
    """Of requests that join one after the other, more than run at once."""
    arrivals = [
        Arrival(str(number), prompt, greedy(10 + 3 * (number % 4)), step=number // 2)
        for number, prompt in enumerate(draw_prompts(12))
    ]
    engine = with_drafts
    engine.set_policy(policy, draft_tokens=draft_tokens, max_draft_tokens=4)
    if policy in ("dynamic", "goodput"):
        make_up_costs(engine)
    assert isinstance(engine.runner, TetrisGPUModelRunner)
    assert isinstance(engine.runner.adaptive_verification, PlannedVerification)
    captured = engine.runner.cudagraph_manager.graphs.values()
    num_replays = sum(graph.num_replays for graph in captured)
    outputs = drive(engine, arrivals)
    counters = engine.scheduler.counters
    assert summarize_by_name(outputs) == summarize_by_name(drive(plain, arrivals))
    check_counters(counters)
    assert counters.num_accepted_tokens > len(arrivals)
    assert (counters.num_cut_tokens["budget"] > 0) == (policy in ("tetris", "goodput"))
    assert sum(graph.num_replays for graph in captured) > num_replays


def test_logprobs_are_the_targets_own(plain, ours):
    params = greedy(16, logprobs=3)
    outputs, expected = (complete(one, PROMPTS, params) for one in (ours, plain))
    assert summarize_all(outputs) == summarize_all(expected)
    for output, reference in zip(outputs, expected, strict=True):
        positions = output.outputs[0].logprobs
        others = reference.outputs[0].logprobs
        assert len(positions) == len(others) == 16
        for position, other in zip(positions, others, strict=True):
            assert position.keys() == other.keys()
            for token, logprob in position.items():
                assert logprob.logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_structured_outputs_follow_their_grammar(plain, ours):
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex=PATTERN)
    structured = greedy(
        18, structured_outputs=grammar, ignore_eos=False, detokenize=True
    )
    # Free requests share the batch.
    params = [structured, greedy(18, detokenize=True)] * (len(PROMPTS) // 2)
    counters = ours.scheduler.counters
    outputs, expected = (complete(one, PROMPTS, params) for one in (ours, plain))
    assert summarize_all(outputs) == summarize_all(expected)
    for output in outputs[::2]:
        assert re.fullmatch(r"([a-e]{2}[0-9])*[a-e]{0,2}", output.outputs[0].text)
    assert counters.num_accepted_tokens > 0
    check_counters(counters)


def test_other_settings_change_no_token(plain, ours):
    params = [
        greedy(16),
        greedy(16, extra_args={"speculative_decoding": "off"}),
        greedy(16, repetition_penalty=1.3, presence_penalty=0.5),
        greedy(16, min_tokens=5, stop_token_ids=list(range(3, 20)), ignore_eos=False),
        greedy(16, allowed_token_ids=list(range(10, 40))),
        greedy(1),
    ]
    outputs, expected = (complete(one, PROMPTS, params) for one in (ours, plain))
    assert summarize_all(outputs) == summarize_all(expected)
    counters = ours.scheduler.counters
    assert counters.num_cut_tokens["opt_out"] > 0
    assert counters.num_cut_tokens["length"] > 0


@pytest.mark.parametrize("reason", ["attention_backend", "eager"])
def test_what_stands_in_the_way_leads_to_plain_verification(
    reason, pair, plain, monkeypatch
):
    """Not to a refusal to start, as vLLM's own adaptive verification does."""
    if reason == "attention_backend":
        # The CPU's has no graphs, left as it is.
        builder = graphs.CPUAttentionMetadataBuilder
        never = graphs.AttentionCGSupport.NEVER
        monkeypatch.setattr(builder, "_cudagraph_support", never)
    else:
        monkeypatch.setattr(plugin, "graphs_wanted", graphs.CUDAGraphMode.NONE)
    params = greedy(16)
    expected = summarize_all(complete(plain, PROMPTS, params))
    with run_interpreted(*pair, policy="tetris") as engine:
        assert engine.runner.adaptive_verification is None
        outputs = summarize_all(complete(engine, PROMPTS, params))
        counters = engine.scheduler.counters

    assert outputs == expected
    assert counters.num_fallbacks[f"plain_{reason}"] > 0
    assert counters.num_accepted_tokens > 0
    assert counters.num_cut_tokens["budget"] == 0


def test_times_and_profile_reach_the_planner(pair, monkeypatch):
    profiles = []
    fit = GoodputPlanner.fit_profile

    def spy(planner, profile):
        profiles.append(profile)
        fit(planner, profile)

    monkeypatch.setattr(GoodputPlanner, "fit_profile", spy)
    with run_interpreted(*pair, policy="goodput", draft_tokens=4) as engine:
        profiles.clear()  # Of the planner's rehearsal.
        cost = engine.scheduler._planner.cost
        complete(engine, PROMPTS, greedy(32))
        report = engine.scheduler.snapshot()["planner"]

    assert len(profiles) == 1
    # Every captured size, and some beyond.
    assert set(graphs.CAPTURED_TOKENS) < set(profiles[0].num_tokens)
    assert cost.num_steps > 10
    assert report["calibration_error"] >= 0


OURS = Path(serving.__file__).parents[1]

READS = {
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Watch(TorchDispatchMode):
    """Notes which functions of ours read values."""

    def __init__(self):
        super().__init__()
        self.num_operations = 0
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        if (func in READS or has_mask(func, args)) and (place := find_reader()):
            self.places.add(place)
        return func(*args, **(kwargs or {}))


def has_mask(func, args):
    """Whether this is an index with a mask: how many rows it takes, only it knows."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(one is not None and one.dtype == torch.bool for one in args[1])


def find_reader():
    """Return the function that asked, if the nearest outside of torch is ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts:
            is_ours = path.is_relative_to(OURS / "serving") or path.is_relative_to(
                OURS / "policies"
            )
            return f"{path.stem}.{frame.f_code.co_name}" if is_ours else None
        frame = frame.f_back
    return None


@contextmanager
def watch_steps(engine):
    """Watch what the runner does from a step's schedule to its last draft."""
    watch = Watch()
    runner = engine.runner
    execute, sample = runner.execute_model, runner.sample_tokens

    def watched(method):
        def call(*args, **kwargs):
            with watch:
                return method(*args, **kwargs)

        return call

    runner.execute_model, runner.sample_tokens = watched(execute), watched(sample)
    try:
        yield watch
    finally:
        del runner.execute_model, runner.sample_tokens


def run_steps(engine):
    with watch_steps(engine) as watch:
        complete(engine, draw_prompts(4), greedy(16))
    assert watch.num_operations > 1000
    return watch


def test_no_step_reads_a_value(ours):
    assert run_steps(ours).places == set()


def test_a_step_that_does_is_found(ours, monkeypatch):
    write_totals = verification_v2._write_totals

    def write_and_read(lengths, out):
        write_totals(lengths, out)
        assert int(out[-1]) >= 0

    code = write_and_read.__code__
    monkeypatch.setattr(
        write_and_read,
        "__code__",
        code.replace(co_filename=verification_v2.__file__),
        raising=True,
    )
    monkeypatch.setattr(verification_v2, "_write_totals", write_and_read)
    assert run_steps(ours).places == {"verification.write_and_read"}
