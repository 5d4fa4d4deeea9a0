"""Above temperature 0 the output follows the target's law, whatever is verified.

The vocabulary is so small that the joint law of the first tokens is known exactly.
Thousands of requests go through a real engine in mixed batches whose budget is below
the number of drafts, and a chi-square test compares. Engine and requests are seeded,
so a p-value hardly changes between runs; `ACCEPTED_ABOVE` leaves one false alarm in
10,000 for another machine. That the test has power is shown by controls that break one
rule each and that the same code, with as many samples, rejects.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.engine.conftest import Engine, run_engine
from tests.engine.made_up import make_up_beliefs, make_up_costs
from tests.engine.statistics import (
    chi_square,
    chi_square_p_value,
    count_sequences,
    sequence_law,
    token_law,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    Laws = dict[str, NDArray[np.float64]]
    Judge = Callable[["Sampled", Collection[str]], float]
    Pairs = dict[str, tuple[Path, Path]]

CHARACTERS = ("<eos>", "<bos>", "a", "b", "c", "d", "e", "f")
VOCAB = len(CHARACTERS)

GRAMMAR = "(a[bc]|b[cd]|c[de]){4}"
FOLLOWERS = {2: (3, 4), 3: (4, 5), 4: (5, 6)}
"""Token ids that `GRAMMAR` allows after each first character of a pair."""

LENGTH = 3
"""Tokens whose joint law is tested: the first comes from prefill, the others from
drafts that were verified, cut, rejected or replaced."""

MAX_TOKENS = 5
"""Two more than tested, so that the tested positions are drafted at full depth."""

NUM_SAMPLES = 800
"""Requests per group and engine."""

ACCEPTED_ABOVE = 1e-4
REJECTED_BELOW = 1e-6

PAPERS_RULE = "tests.engine.biased_worker.DrawnTokenWorker"
GRAMMAR_BLIND = "tests.engine.biased_worker.GrammarBlindWorker"

FIXED = {"policy": "fixed", "draft_tokens": 2}
TETRIS = {"policy": "tetris", "draft_tokens": 1, "extra_draft_tokens": 1}
DEEP_TETRIS = {"policy": "tetris", "draft_tokens": 1, "extra_draft_tokens": 2}
GOODPUT = {"policy": "goodput", "draft_tokens": 3}
DYNAMIC = {"policy": "dynamic", "draft_tokens": 3}
CHEAP_PASS_MS = (0.02, 0.1)


@dataclass(frozen=True)
class Group:
    """Requests of one prompt and one setting: equal draws from one law."""

    prompt: tuple[int, ...]
    sampling: dict[str, float] = field(default_factory=dict)
    seeded: bool = False
    structured: bool = False

    def make_params(self, number: int) -> Any:
        """Build the sampling parameters of the group's request `number`."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        return SamplingParams(
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            seed=number if self.seeded else None,
            structured_outputs=(
                StructuredOutputsParams(regex=GRAMMAR) if self.structured else None
            ),
            **{"temperature": 1.0, **self.sampling},
        )


FREE_GROUPS = {
    "plain": Group((1, 0, 1)),
    "other prompt": Group((1, 1, 0)),
    "seeded": Group((1, 7, 7), seeded=True),
    "cool": Group((1, 1, 6), {"temperature": 0.7}),
    "truncated": Group((1, 1, 1), {"temperature": 0.7, "top_k": 5, "top_p": 0.9}),
    "greedy": Group((1, 4, 7), {"temperature": 0.0}),
}
"""Prompts and settings differ, so that requests compete for the budget with different
odds, and every sampling path of the engine meets the others in one batch."""

STRUCTURED_GROUPS = {
    "structured": Group((1, 0, 5), structured=True),
    "cool structured": Group((1, 2, 6), {"temperature": 0.7}, structured=True),
}
COMPANIONS = {name: FREE_GROUPS[name] for name in ("plain", "seeded")}
"""Free requests that share the batch with structured ones."""

FLAT = ("plain", "other prompt", "seeded")
"""Groups with low confidence at times: these lose whole blocks to the others."""


@dataclass
class Block:
    """What became of one request's drafts in one step.

    Attributes:
        draft_probs: `[num_verified, vocab]`, float32. Draft distribution as the
            rejection sampler received it; None if it received none.
    """

    num_offered: int
    num_verified: int
    draft_probs: NDArray[np.float32] | None = None


@dataclass
class Sampled:
    """What an engine emitted per group, and how it treated every block."""

    tokens: dict[str, list[Sequence[int]]]
    blocks: dict[str, list[Block]]
    counters: dict[str, Any]


def sample(
    pair: tuple[Path, Path],
    groups: dict[str, Group],
    *,
    drafts: str,
    prepare: Callable[[Engine], None] = lambda _: None,
    **engine_args: Any,
) -> Sampled:
    """Send `NUM_SAMPLES` requests of every group through one engine, interleaved."""
    names = list(groups) * NUM_SAMPLES
    with run_engine(
        *pair,
        speculative={"draft_sample_method": drafts},
        skip_tokenizer_init=False,
        max_model_len=64,
        max_num_seqs=64,
        seed=1,
        **engine_args,
    ) as engine:
        prepare(engine)
        blocks = spy_on_blocks(engine, groups)
        outputs = engine.llm.generate(
            [{"prompt_token_ids": list(groups[name].prompt)} for name in names],
            [groups[name].make_params(number) for number, name in enumerate(names)],
            use_tqdm=False,
        )
        counters = engine.scheduler.snapshot()
    tokens: dict[str, list[Sequence[int]]] = defaultdict(list)
    for name, output in zip(names, outputs, strict=True):
        tokens[name].append(output.outputs[0].token_ids)
    return Sampled(tokens, blocks, counters)


def spy_on_blocks(engine: Engine, groups: dict[str, Group]) -> dict[str, list[Block]]:
    """Record every block on its way through the scheduler and rejection sampler."""
    group_of = {group.prompt: name for name, group in groups.items()}
    assert len(group_of) == len(groups), "groups are told apart by their prompts"
    blocks: dict[str, list[Block]] = defaultdict(list)
    in_flight: dict[str, Block] = {}
    scheduler, runner = engine.scheduler, engine.runner
    schedule: Callable[..., Any] = scheduler.schedule

    def spying_schedule(*args: Any) -> Any:
        offered = {r.request_id: len(r.spec_token_ids) for r in scheduler.running}
        output = schedule(*args)
        in_flight.clear()
        for req_id in output.num_scheduled_tokens:
            if num_offered := offered.get(req_id):
                verified = output.scheduled_spec_decode_tokens.get(req_id, ())
                in_flight[req_id] = Block(num_offered, len(verified))
                prompt = tuple(scheduler.requests[req_id].prompt_token_ids)
                blocks[group_of[prompt]].append(in_flight[req_id])
        return output

    def note_draft_probs(_sampler: Any, args: tuple[Any, ...]) -> None:
        metadata, draft_probs = args[:2]
        if draft_probs is None:
            return
        rows = draft_probs.split(metadata.num_draft_tokens)
        for req_id, probs in zip(runner.input_batch.req_ids, rows, strict=True):
            if len(probs):
                in_flight[req_id].draft_probs = probs.numpy().copy()

    scheduler.schedule = spying_schedule
    runner.rejection_sampler.register_forward_pre_hook(note_draft_probs)
    return blocks


def cheapen_passes(engine: Engine) -> None:
    """Make up prices at which a third drafter pass pays for some batches.

    A drafter that is often wrong needs cheap verification for that.
    """
    make_up_costs(engine, CHEAP_PASS_MS, target_ms=(60.3, 100.0))


def believe_in_passes(engine: Engine) -> None:
    """Make passes as cheap, and keep the belief in the drafter."""
    make_up_beliefs(engine, CHEAP_PASS_MS)


def assert_draft_probs_arrived(blocks: list[Block], *, one_hot: bool = False) -> None:
    """Every verified block was checked against the distribution it was drawn from.

    A single missing row would turn its batch to one-hot verification, under which
    every rule is exact and the test has no power.
    """
    verified = [block for block in blocks if block.num_verified]
    assert verified
    for block in verified:
        assert block.draft_probs is not None
        assert len(block.draft_probs) == block.num_verified
        assert ((block.draft_probs.max(axis=-1) == 1.0) == one_hot).all()


def assert_budget_selects(sampled: Sampled, names: Collection[str]) -> None:
    """The budget cut drafts; `names` had blocks cut to nothing and blocks verified."""
    assert sampled.counters["num_cut_tokens"]["budget"] > NUM_SAMPLES
    for name in names:
        num_verified = [block.num_verified for block in sampled.blocks[name]]
        assert num_verified.count(0) > NUM_SAMPLES // 50, name
        assert len(num_verified) - num_verified.count(0) > NUM_SAMPLES // 2, name


def assert_drafts_end_early(sampled: Sampled) -> None:
    """Whole batches were drafted to the full depth, and others less deep."""
    offered = [block.num_offered for name in FLAT for block in sampled.blocks[name]]
    for depth in range(1, GOODPUT["draft_tokens"] + 1):
        assert offered.count(depth) > NUM_SAMPLES // 50, depth


def write_small_pair(folder: Path, *, noise: float, seed: int = 2) -> tuple[Path, Path]:
    """Write a target over `CHARACTERS` and a draft that is it plus weight noise."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=0,
            initializer_range=0.15,
        )
    ).float()
    target, draft = folder / "target", folder / "draft"
    model.save_pretrained(target)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * weight.std() * noise)
    model.save_pretrained(draft)
    for model_folder in (target, draft):
        make_tokenizer().save_pretrained(model_folder)
    return target, draft


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character; grammars need one."""
    ids = {character: token_id for token_id, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", bos_token="<bos>"
    )


def follow_grammar(generated: tuple[int, ...]) -> Sequence[int]:
    """Return the token ids that `GRAMMAR` allows next."""
    return FOLLOWERS[generated[-1]] if len(generated) % 2 else tuple(FOLLOWERS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """One target with a draft equal to it, and with one that often disagrees.

    A perfect draft is where conditioning on the drawn token does most harm: it is
    never rejected, so every deviation comes from the selection.
    """
    return {
        name: write_small_pair(tmp_path_factory.mktemp(name), noise=noise)
        for name, noise in (("perfect", 0.0), ("noisy", 0.3))
    }


@pytest.fixture(scope="module")
def laws(pairs: Pairs) -> Laws:
    """The exact law of every group; both pairs have the same target."""
    model = LlamaForCausalLM.from_pretrained(pairs["perfect"][0]).double()
    return {
        name: sequence_law(
            model,
            group.prompt,
            LENGTH,
            allowed=follow_grammar if group.structured else None,
            **group.sampling,
        )
        for name, group in (FREE_GROUPS | STRUCTURED_GROUPS).items()
    }


@pytest.fixture
def judge(laws: Laws, record_property: Callable[..., None]) -> Judge:
    """Test several groups against their laws at once; gives the p-value."""

    def compare(sampled: Sampled, names: Collection[str]) -> float:
        p_value = chi_square_p_value(
            chi_square(count_sequences(sampled.tokens[name], VOCAB, LENGTH), laws[name])
            for name in names
        )
        record_property(f"p_value of {', '.join(names)}", p_value)
        return p_value

    return compare


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("pair", ["perfect", "noisy"])
def test_tetris_with_sampled_drafts_follows_the_targets_law(
    pair: str, pairs: Pairs, judge: Judge
) -> None:
    sampled = sample(pairs[pair], FREE_GROUPS, drafts="probabilistic", **TETRIS)

    for name in FREE_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert_budget_selects(sampled, FLAT)
    assert judge(sampled, FREE_GROUPS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("pair", ["perfect", "noisy"])
def test_the_papers_rule_with_sampled_drafts_is_rejected(
    pair: str, pairs: Pairs, judge: Judge
) -> None:
    """The control: the same test, but confidence is the drawn token's probability."""
    sampled = sample(
        pairs[pair],
        FREE_GROUPS,
        drafts="probabilistic",
        worker_cls=PAPERS_RULE,
        **TETRIS,
    )

    for name in FREE_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert_budget_selects(sampled, FLAT)
    assert judge(sampled, FREE_GROUPS) < REJECTED_BELOW


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [pytest.param(FIXED, id="fixed"), pytest.param(DEEP_TETRIS, id="deep-tetris")],
)
def test_other_depths_with_sampled_drafts_follow_the_targets_law(
    policy: dict[str, Any],
    pairs: Pairs,
    judge: Judge,
) -> None:
    sampled = sample(pairs["noisy"], FREE_GROUPS, drafts="probabilistic", **policy)

    for name in FREE_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert judge(sampled, FREE_GROUPS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "prepare"), [("perfect", believe_in_passes), ("noisy", cheapen_passes)]
)
def test_goodput_with_sampled_drafts_follows_the_targets_law(
    pair: str,
    prepare: Callable[[Engine], None],
    pairs: Pairs,
    judge: Judge,
) -> None:
    sampled = sample(
        pairs[pair], FREE_GROUPS, drafts="probabilistic", prepare=prepare, **GOODPUT
    )

    for name in FREE_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert sampled.counters["num_cut_tokens"]["budget"] > NUM_SAMPLES // 4
    assert_drafts_end_early(sampled)
    assert judge(sampled, FREE_GROUPS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
def test_goodput_by_the_drawn_tokens_probability_is_rejected(
    pairs: Pairs, judge: Judge
) -> None:
    """The control: the same test, but confidence is the drawn token's probability."""
    sampled = sample(
        pairs["perfect"],
        FREE_GROUPS,
        drafts="probabilistic",
        prepare=believe_in_passes,
        worker_cls=PAPERS_RULE,
        **GOODPUT,
    )

    assert sampled.counters["num_cut_tokens"]["budget"] > NUM_SAMPLES // 4
    assert_drafts_end_early(sampled)
    assert judge(sampled, FREE_GROUPS) < REJECTED_BELOW


@pytest.mark.vllm
@pytest.mark.slow
def test_dynamic_with_sampled_drafts_follows_the_targets_law(
    pairs: Pairs, judge: Judge
) -> None:
    sampled = sample(
        pairs["noisy"],
        FREE_GROUPS,
        drafts="probabilistic",
        prepare=make_up_costs,
        **DYNAMIC,
    )

    for name in FREE_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert judge(sampled, FREE_GROUPS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
def test_argmax_drafts_follow_the_targets_law(pairs: Pairs, judge: Judge) -> None:
    """Here the largest and the drawn token's probability are one: the paper's rule."""
    sampled = sample(pairs["noisy"], FREE_GROUPS, drafts="greedy", **TETRIS)

    blocks = [block for name in FREE_GROUPS for block in sampled.blocks[name]]
    assert all(block.draft_probs is None for block in blocks)
    assert_budget_selects(sampled, FLAT)
    assert judge(sampled, FREE_GROUPS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
def test_a_grammar_with_sampled_drafts_follows_the_masked_law(
    pairs: Pairs, judge: Judge
) -> None:
    sampled = sample(
        pairs["noisy"],
        STRUCTURED_GROUPS | COMPANIONS,
        drafts="probabilistic",
        **TETRIS,
    )

    for name in STRUCTURED_GROUPS:
        assert_draft_probs_arrived(sampled.blocks[name], one_hot=True)
    for name in COMPANIONS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert_budget_selects(sampled, COMPANIONS)
    assert sampled.counters["num_cut_tokens"]["grammar"] > 0
    assert judge(sampled, STRUCTURED_GROUPS | COMPANIONS) > ACCEPTED_ABOVE


@pytest.mark.vllm
@pytest.mark.slow
def test_a_grammar_that_cuts_at_drawn_tokens_is_rejected(
    pairs: Pairs, judge: Judge
) -> None:
    """The control: the same test, but structured requests draft like the others."""
    sampled = sample(
        pairs["noisy"],
        STRUCTURED_GROUPS | COMPANIONS,
        drafts="probabilistic",
        worker_cls=GRAMMAR_BLIND,
        **TETRIS,
    )

    for name in STRUCTURED_GROUPS | COMPANIONS:
        assert_draft_probs_arrived(sampled.blocks[name])
    assert judge(sampled, STRUCTURED_GROUPS) < REJECTED_BELOW
    # Whoever follows no grammar is not harmed.
    assert judge(sampled, COMPANIONS) > ACCEPTED_ABOVE


def test_the_chi_square_test_agrees_with_the_tables() -> None:
    for statistic, degrees, p_value in (
        (3.841, 1, 0.05),
        (18.307, 10, 0.05),
        (29.588, 10, 0.001),
        (124.342, 100, 0.05),
    ):
        assert chi_square_p_value([(statistic, degrees)]) == pytest.approx(
            p_value, rel=2e-3
        )
    assert chi_square_p_value([(1.841, 1), (16.466, 9)]) == pytest.approx(
        0.05, rel=2e-3
    )


def test_the_chi_square_test_tells_the_two_token_example_apart() -> None:
    """A perfect drafter of (.8, .2) under the paper's rule emits (.9024, .0976).

    Two requests, one draft each verified on average (capacity 2, one extra draft).
    """
    rng = np.random.default_rng(0)
    law = np.array([0.8, 0.2])
    exact, biased = (rng.multinomial(800, p) for p in (law, [0.9024, 0.0976]))

    assert chi_square_p_value([chi_square(exact, law)]) > ACCEPTED_ABOVE
    assert chi_square_p_value([chi_square(biased, law)]) < REJECTED_BELOW


def test_rare_outcomes_are_pooled_and_impossible_ones_rejected() -> None:
    law = np.array([0.9, 0.09, 0.004, 0.003, 0.003, 0.0])

    # 1000 samples: the three rare outcomes hold 10 together, one bin of 7 with 3 left
    # over, which joins it.
    assert chi_square(np.array([900, 90, 4, 3, 3, 0]), law) == (pytest.approx(0.0), 2)
    assert chi_square(np.array([900, 90, 4, 3, 2, 1]), law)[0] == np.inf
    with pytest.raises(ValueError, match="too few"):
        chi_square(np.array([1, 1, 0, 0, 0, 0]), law)


def test_the_exact_law_truncates_as_sampling_does() -> None:
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64).log()

    def law(**sampling: float) -> list[float]:
        return token_law(logits, **sampling).tolist()

    assert law() == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert law(temperature=0.5) == pytest.approx([16 / 30, 9 / 30, 4 / 30, 1 / 30])
    assert law(top_k=2) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])
    # .4 + .3 do not reach .75 but .4 + .3 + .2 do.
    assert law(top_p=0.75) == pytest.approx([4 / 9, 3 / 9, 2 / 9, 0.0])
    assert law(temperature=0.0) == [1.0, 0.0, 0.0, 0.0]
