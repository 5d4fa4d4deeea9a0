"""The drafter's data, training and export, on a target of a few thousand weights."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest

from loadtest.models.drafter.chats import Chat, WorkDir, read_shard, write_shard
from tests.engine.checks import complete, draw_prompts, greedy
from tests.engine.conftest import THIRD_PARTY_MAY_WARN, run_engine
from tests.engine.tiny_models import (
    VOCAB_SIZE,
    write_llama_pair,
    write_markov_llama,
    write_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.filterwarnings(*THIRD_PARTY_MAY_WARN),
]

AUX_LAYERS = (0, 1, 2)
DRAFT_TOKENS = 4
TEMPLATE = "{% for m in messages %}<s>{{ m.role[0] }}{{ m.content }}</s>{% endfor %}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_markov_llama(tmp_path_factory.mktemp("target"))
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def data(target: Path, tmp_path: Path) -> WorkDir:
    """A held-out shard and one to train on, with features."""
    from loadtest.models.drafter.features import compute_features

    rng = random.Random(0)
    work_dir = WorkDir(tmp_path / "work", target)
    for shard in (0, 1):
        chats = []
        for number in range(48):
            length = rng.randint(12, 60)
            tokens = rng.choices(range(3, 40), k=length)
            chats.append(Chat(tokens, [(4, length)], (0.0, 0.7, 1.0)[number % 3]))
        write_shard(work_dir.chats_of(shard), chats)
    compute_features(target, work_dir, AUX_LAYERS, lambda line: None)
    return work_dir


def note_drafts(
    target: Path, method: str, draft: Path
) -> list[tuple[list[int], list[int]]]:
    """Let vLLM draft; return what each request had, and what was drafted for it."""
    drafted: list[tuple[list[int], list[int]]] = []
    config = {
        "method": method,
        "model": str(draft),
        "num_speculative_tokens": DRAFT_TOKENS,
    }
    with run_engine(target, speculative_config=config) as engine:
        take = engine.scheduler.update_draft_token_ids

        def note(drafts):
            known = engine.scheduler.requests
            for name, tokens in zip(
                drafts.req_ids, drafts.draft_token_ids, strict=True
            ):
                if name in known and len(tokens) == DRAFT_TOKENS:
                    drafted.append((list(known[name].all_token_ids), list(tokens)))
            take(drafts)

        engine.scheduler.update_draft_token_ids = note
        complete(engine, draw_prompts(4), greedy(32, temperature=1.0, seed=1))
    return drafted


def test_vllm_drafts_what_the_unrolled_head_predicts(target: Path, tmp_path: Path):
    import torch
    from transformers import LlamaForCausalLM

    from loadtest.models.describe import describe_hardware
    from loadtest.models.drafter.export import export
    from loadtest.models.drafter.head import Eagle3Head
    from loadtest.models.drafter.train import Recipe

    model = LlamaForCausalLM.from_pretrained(target).float()
    vocabulary = sorted(random.Random(1).sample(range(VOCAB_SIZE), 48))
    torch.manual_seed(2)
    head = Eagle3Head(model.config, len(vocabulary), len(AUX_LAYERS))
    with torch.no_grad():
        for weight in head.parameters():
            # Strong enough for every input, and every row attention sees, to matter.
            weight.mul_(4.0 if weight.ndim == 2 else torch.rand_like(weight) + 0.5)
    work_dir = WorkDir(tmp_path, target)
    state = {
        "recipe": asdict(Recipe(aux_layer_ids=AUX_LAYERS)),
        "vocabulary": vocabulary,
        "shards": [],
        "train_s": 0.0,
        "curve": [],
        "hardware": describe_hardware(),
        **dict.fromkeys(("num_chats", "num_answer_tokens", "tokens_seen"), 0),
    }
    torch.save({"state": state, "weights": head.state_dict()}, work_dir.checkpoint)
    export(target, work_dir, tmp_path / "head")

    drafted = note_drafts(target, "eagle3", tmp_path / "head")

    embedding = model.get_input_embeddings().weight.detach()
    for known, tokens in drafted:
        with torch.no_grad():
            run = model(torch.tensor([known]), output_hidden_states=True)
            states = [run.hidden_states[layer] for layer in AUX_LAYERS]
            features = torch.cat(states, dim=-1)
            outputs = head.unroll(
                embedding,
                torch.tensor([known + tokens]),
                torch.nn.functional.pad(features, (0, 0, 0, DRAFT_TOKENS)),
                DRAFT_TOKENS,
            )
            row = len(known) - 2
            best = [int(head.lm_head(output[0, row]).argmax()) for output in outputs]
        assert [vocabulary[n] for n in best] == tokens
    assert len(drafted) > 60
    assert len({tuple(tokens) for _, tokens in drafted}) > 30


def test_vllm_drafts_what_a_trained_draft_model_predicts(
    target: Path, data: WorkDir, tmp_path: Path
):
    import torch
    from transformers import LlamaForCausalLM

    from loadtest.models.drafter.export import export
    from loadtest.models.drafter.train import Recipe, Trainer

    recipe = Recipe(
        "draft_model",
        aux_layer_ids=AUX_LAYERS,
        draft_vocab_size=VOCAB_SIZE,
        width=32,
        num_steps=1,
        batch_tokens=256,
        warmup_batches=4,
        evaluate_every=1000,
    )
    work_dir = WorkDir(data.path, target, recipe.method)
    Trainer(target, work_dir, recipe).run(6000, lambda line: None)
    losses = [
        json.loads(line)["loss"][0] for line in work_dir.curve.read_text().splitlines()
    ]
    assert losses[-1] < losses[0]
    export(target, work_dir, tmp_path / "draft")
    assert "a Llama of its own" in (tmp_path / "draft" / "README.md").read_text()

    drafted = note_drafts(target, "draft_model", tmp_path / "draft")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "draft").float()
    for known, tokens in drafted:
        with torch.no_grad():
            logits = model(torch.tensor([known + tokens])).logits[0]
        best = logits[len(known) - 1 : -1].argmax(-1)
        assert best.tolist() == tokens
    assert len(drafted) > 60
    assert len({tuple(tokens) for _, tokens in drafted}) > 5


def test_shards_that_came_along_are_of_use_to_their_own_target_only(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    own = WorkDir(tmp_path / "own", target)
    chat = Chat([5, 6, 7], [(1, 3)], 0.7)
    write_shard(own.chats_of(3), [chat])
    came = own.chats_of(3).parent
    (came / "target.txt").write_bytes((own.path / "target.txt").read_bytes())
    monkeypatch.setattr("loadtest.models.drafter.chats._WRITTEN", came)

    fresh = WorkDir(tmp_path / "fresh", target)
    write_shard(fresh.chats_of(4), [chat])
    assert fresh.shards() == [3, 4]
    assert read_shard(fresh.chats_of(3)) == [chat]

    other, _ = write_llama_pair(tmp_path, noise=0.0)
    assert WorkDir(tmp_path / "others", other).shards() == []


def test_a_step_counts_where_its_token_belongs_to_the_answer_being_written():
    import torch

    from loadtest.models.drafter.head import predictable

    assert predictable(torch.tensor([[0, 0, 1, 1, 1, 0, 2, 2]]), 2).int().tolist() == [
        [[0, 1, 1, 0, 0, 1, 0, 0]],
        [[0, 1, 0, 0, 0, 0, 0, 0]],
    ]


def test_a_gpu_computes_what_would_lie_on_the_disk(target: Path, data: WorkDir):
    import torch
    from transformers import AutoModelForCausalLM

    from loadtest.models.drafter.features import Corpus

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    shards = data.ready(held_out=False, with_features=False)
    read, computed = (
        Corpus(data, shards, model, AUX_LAYERS, from_disk=on_disk)
        for on_disk in (True, False)
    )
    assert read.size == computed.size
    assert read.size["num_answer_tokens"] > read.size["num_chats"] == 48

    for numbers in read.plan("any", 256):
        one, other = read.load(numbers), computed.load(numbers)
        assert one.token_ids.equal(other.token_ids)
        # What pads a row is computed too, and seen by nobody.
        lengths = [
            chat.index(0) if 0 in chat else None for chat in one.token_ids.tolist()
        ]
        for row, end in enumerate(lengths):
            for name in ("features", "last"):
                kept, made = (getattr(b, name)[row, :end] for b in (one, other))
                torch.testing.assert_close(kept, made, rtol=0.05, atol=0.05)


def test_another_target_s_drafter_does_not_take_the_shipped_one_s_place(
    target: Path, data: WorkDir, capsys: pytest.CaptureFixture[str]
):
    from loadtest.models.drafter.__main__ import main

    arguments = ["export", "--target", str(target), "--work-dir", str(data.path)]
    assert main(arguments) == 1
    assert "--output" in capsys.readouterr().err


def test_stopped_training_goes_on_with_the_same_losses(
    target: Path, data: WorkDir, monkeypatch: pytest.MonkeyPatch
):
    from loadtest.models.drafter import train
    from loadtest.models.drafter.train import Recipe, Trainer

    recipe = Recipe(
        aux_layer_ids=AUX_LAYERS,
        draft_vocab_size=40,
        num_steps=3,
        batch_tokens=256,
        warmup_batches=4,
        evaluate_every=1000,
    )
    num_tokens = 5000

    def curve() -> list[dict[str, object]]:
        lines = data.curve.read_text().splitlines()
        return [json.loads(line) | {"train_s": 0} for line in lines]

    Trainer(target, data, recipe).run(num_tokens, lambda line: None)
    expected = curve()
    data.checkpoint.unlink()

    monkeypatch.setattr(train, "_SAVE_EVERY_S", 0.0)
    evaluations = []

    def stop(line: str) -> None:
        if "accepted" in line:
            evaluations.append(line)
        if len(evaluations) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trainer(target, data, recipe).run(num_tokens, stop)
    assert len(curve()) == 2
    Trainer(target, data, recipe).run(num_tokens, lambda line: None)

    assert curve() == expected
    assert expected[-1]["loss"] < expected[0]["loss"]
    with pytest.raises(ValueError, match="other settings"):
        Trainer(target, data, replace(recipe, num_steps=2))
    Trainer(target, data, replace(recipe, evaluate_every=7))


def test_generation_goes_on_after_a_kill(tmp_path: Path):
    from loadtest.models.drafter.generate import generate

    # Undecided, so that it ends a turn now and then.
    target, _ = write_llama_pair(tmp_path, noise=0.0)
    write_tokenizer(target)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    work_dir = WorkDir(tmp_path / "work", target)
    # A shard, and what a kill in the middle of writing the next one leaves.
    first = work_dir.chats_of(0)
    write_shard(first, [Chat([1, 60, 5, 5, 5, 5, 2, 1, 36, 7, 2], [(9, 11)], 0.0)])
    before = first.read_bytes()
    (first.parent / ".00001.npz.1.partial").write_bytes(b"PK")

    engine = {"max_num_seqs": 8, "kv_cache_memory_bytes": 64 << 20}
    limits = {"chats_per_shard": 64, "answer_tokens": 40}
    generate(target, work_dir, 2, lambda line: None, **limits, **engine)

    assert work_dir.shards() == [0, 1]
    assert first.read_bytes() == before
    chats = [c for n in (0, 1) for c in read_shard(work_dir.chats_of(n))]
    asked = [tuple(c.token_ids[2 : c.token_ids.index(2)]) for c in chats]
    # How many are kept depends on how a processor rounds.
    assert len(asked) > 1
    assert len(set(asked)) == len(asked)
    for chat in chats[1:]:
        for begin, end in chat.answers:
            # `</s><s>a`, which asks for an answer, then the answer.
            assert chat.token_ids[begin - 3 : begin - 1] == [2, 1]
            assert 0 < end - begin <= 40
