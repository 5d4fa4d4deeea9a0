"""An engine goes on where another stopped, as if it had never been another."""

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import LlamaForCausalLM

from serving.engine.shared.replay import EMITTED_TOKEN_IDS
from serving.front.in_flight import derive_seed
from tests.engine.checks import greedy
from tests.engine.conftest import run_engine
from tests.engine.tiny_models import write_llama_pair, write_tokenizer

pytestmark = pytest.mark.vllm

NUM_TOKENS = 40
PROMPTS = ((1, 0, 1), (1, 1, 0), (1, 7, 7), (1, 4, 2, 6, 3))
CUTS = (1, 2, 7, 20, 36)
"""Tokens that had come out. With 36, a block of the prefix cache ends among them."""

LAW_PROMPT = (1, 0, 1)
NUM_SAMPLES = 1000

ACCEPTED_ABOVE = 1e-4
REJECTED_BELOW = 1e-6

KINDS = {
    "plain": {},
    "penalties": {
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "least tokens": {"min_tokens": 30, "stop_token_ids": [3, 4, 5]},
    "bad words": {"bad_words": ["ab", "cd", "fe"]},
    "log probabilities": {"logprobs": 2},
    "grammar": {"regex": "(a[bc]|b[cd]|c[de]){4}"},
}
"""What the output depends on besides the prompt."""

SPECIAL, ALPHABET = {"eos_token": "<eos>", "bos_token": "<bos>"}, "abcdef"
VOCAB = len(SPECIAL) + len(ALPHABET)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pair with eight tokens, all of whose outputs can be counted."""
    pair = write_llama_pair(
        tmp_path_factory.mktemp("pair"),
        noise=0.3,
        seed=2,
        vocab_size=VOCAB,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        eos_token_id=0,
        pad_token_id=None,
    )
    # Grammars need one.
    write_tokenizer(pair[0], SPECIAL, ALPHABET)
    return pair


@pytest.fixture(scope="module")
def engine(pair):
    """With blocks of the prefix cache that are short enough to end in the output."""
    with run_engine(
        *pair,
        policy="tetris",
        draft_tokens=1,
        extra_draft_tokens=1,
        skip_tokenizer_init=False,
        max_model_len=64,
        max_num_seqs=64,
        block_size=32,
        seed=1,
    ) as running:
        yield running


def make_params(kind, emitted=(), **changes):
    from vllm.sampling_params import StructuredOutputsParams

    kind = dict(KINDS[kind])
    if regex := kind.pop("regex", None):
        kind["structured_outputs"] = StructuredOutputsParams(regex=regex)
    if emitted:
        kind["extra_args"] = {EMITTED_TOKEN_IDS: list(emitted)}
    return greedy(**{"max_tokens": NUM_TOKENS, "detokenize": True} | kind | changes)


@pytest.mark.parametrize("name", list(KINDS))
def test_the_tokens_behind_a_cut_are_those_of_an_undisturbed_run(engine, name):
    """Wherever the cut is, and whatever the tokens depend on."""
    for whole in engine.complete(PROMPTS, make_params(name)):
        (expected,) = whole.outputs
        cuts = [cut for cut in CUTS if cut < len(expected.token_ids)]
        assert cuts
        params = [make_params(name, expected.token_ids[:cut]) for cut in cuts]
        replayed = engine.complete([whole.prompt_token_ids] * len(cuts), params)
        for cut, answer in zip(cuts, replayed, strict=True):
            (seen,) = answer.outputs
            assert seen.token_ids == expected.token_ids[cut:]
            assert seen.finish_reason == expected.finish_reason
            if expected.logprobs is not None:
                of_the_rest = expected.logprobs[cut:]
                assert [*map(set, seen.logprobs)] == [*map(set, of_the_rest)]


def test_tokens_appended_to_the_prompt_would_not_do(engine):
    """The control: of a prompt, penalties know nothing."""
    wholes = engine.answer(PROMPTS, make_params("penalties"))
    ids = [tokens for [(tokens, *_)] in wholes]
    prompts = [[*prompt, *own[:7]] for prompt, own in zip(PROMPTS, ids, strict=True)]
    params = make_params("penalties", max_tokens=NUM_TOKENS - 7)
    answers = engine.answer(prompts, params)
    assert [tokens for [(tokens, *_)] in answers] != [own[7:] for own in ids]


def test_a_replay_is_served_before_those_that_wait(engine, monkeypatch):
    """Somebody is waiting in the middle of a sentence."""
    scheduler, orders = engine.scheduler, []
    schedule = scheduler.schedule

    def note_order(*args, **kwargs):
        orders.append([str(one.request_id) for one in scheduler.waiting])
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", note_order)
    params = [make_params("plain", emitted) for emitted in ((), (), (2, 3))]
    engine.complete([LAW_PROMPT] * 3, params)
    numbers = [int(name.split("-")[0]) for name in orders[0]]
    assert numbers[0] == max(numbers)


@torch.no_grad()
def find_law_of_two_tokens(target):
    """Return `[vocab, vocab]`, the exact joint law of the first two tokens."""
    model = LlamaForCausalLM.from_pretrained(target).double()
    prompts = torch.tensor([[*LAW_PROMPT, token] for token in range(VOCAB)])
    probs = model(prompts).logits.softmax(dim=-1)
    return (probs[0, -2, :, None] * probs[:, -1]).numpy()


def compare(pairs, law):
    """Return the p-value of a chi-square test; what is too rare shares one cell."""
    seen = np.zeros_like(law)
    np.add.at(seen, tuple(np.transpose(pairs)), 1)
    expected = law * len(pairs)
    is_common = expected >= 5
    cells = [[*of[is_common], of[~is_common].sum()] for of in (seen, expected)]
    return float(scipy.stats.chisquare(*cells).pvalue)


@pytest.mark.parametrize(
    ("reseed", "follows_the_law"),
    [(derive_seed, True), (lambda seed, _: seed, False)],
    ids=["new noise", "the same noise again"],
)
def test_a_seeded_replay_follows_the_law_under_new_noise_only(
    engine, pair, reseed, follows_the_law
):
    seeds = range(NUM_SAMPLES)
    prompts = [LAW_PROMPT] * NUM_SAMPLES
    options = {"temperature": 1.0, "max_tokens": 4}

    def draw(params):
        return [tokens[0] for [(tokens, *_)] in engine.answer(prompts, params)]

    firsts = draw([make_params("plain", seed=seed, **options) for seed in seeds])
    again = [
        make_params("plain", [first], seed=reseed(seed, 1), **options)
        for seed, first in zip(seeds, firsts, strict=True)
    ]
    pairs = [*zip(firsts, draw(again), strict=True)]
    p_value = compare(pairs, find_law_of_two_tokens(pair[0]))
    assert p_value > ACCEPTED_ABOVE if follows_the_law else p_value < REJECTED_BELOW
