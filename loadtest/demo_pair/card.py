"""Writes the model cards from the training logs and the evaluation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .evaluate import DRAFT_LENGTHS, LONG_CHAT_TURNS
from .tasks import TASKS, TRAINING_TASKS

_TARGET_CARD = """\
# Demo pair: target and draft

Two Llama-architecture models that share a byte-level BPE tokenizer of {vocab_size}
entries and a chat template. They exist so that speculative decoding can be seen,
tested and measured on a machine without GPU and without access to a model hub. They
know the {num_tasks} tasks below and nothing else; what they practised without mastering
it ({practised}) is not listed.

| | target | draft |
|---|---|---|
{sizes}

## Data

Conversations that `loadtest/demo_pair/tasks` generates while training runs: one to
ten turns that mix the tasks, some with a system turn, some with tools. Nothing was
downloaded and no person's text is in them. A prompt whose SHA-256 falls into 13 of
256 classes is held out: training never asks it.

## Training

{training}

The loss counts the assistant's tokens fully and all others at {prompt_weight}. Matrices
follow Muon, the rest Adam, in bfloat16 with float32 master weights; linear warm-up,
constant, linear decay. Both models start with an induction circuit written into their
random weights, and some early rows repeat random tokens to keep it alive; all others
hold chats. The draft learns the target's distribution (KL divergence) rather than the
text. No chat comes twice, so the loss is that of unseen text. Over the run, first to
last:

{losses}

## Right answers

Greedy replies to held-out prompts, alone and after {turns} earlier turns of other tasks
("in a long chat"). *Exact* tasks have one right answer and the reply has to equal it
(a tool call has to have the same name and arguments). For the others the share of
replies that keep to the form is given. `n` counts the distinct prompts, alone and in
long chats.

| task | kind | answer | right | in a long chat | n | tokens |
|---|---|---|---|---|---|---|
{answers}

## Acceptance

The target decodes the same held-out prompts (alone) greedily; the draft proposes `k`
tokens a block, and the target keeps those before the first that differs from its own
choice, then adds one. *Rate* is accepted over drafted tokens (a block is cut where
the reply ends), *length* the mean number of tokens a verification yields, its own
included (1 to k + 1). Rate / length:

| task | kind | {lengths} |
|---|---|{rules}|
{acceptance}

## Use

    python -m loadtest.demo_pair train      # both models, resumes where it stopped
    python -m loadtest.demo_pair evaluate   # writes evaluation.json
    python -m loadtest.demo_pair card       # writes this file
    python -m loadtest.demo_pair pad --parameters 50M --output DIR

The last command writes a copy of the target with the same function at a chosen number
of parameters, for benchmarks at a realistic cost: appended layers whose `o_proj` and
`down_proj` are zero. bfloat16 kernels round differently for different shapes, so a
near-tie between two tokens may fall differently; in float32 the outputs are equal.

## Limits

A toy. It answers any other question with the reply of some task it knows. Long
contexts were trained up to {max_length} tokens.
"""

_DRAFT_CARD = """\
# Demo pair: draft

Draft model for `../demo-target`, with the same tokenizer. Data, training, acceptance
and limits are in [the target's card](../demo-target/README.md).
"""


def write_cards(target: Path, draft: Path) -> None:
    """Write ``README.md`` into both model directories.

    Args:
        target: Directory of the target, with ``evaluation.json``.
        draft: Directory of the draft.

    Raises:
        ValueError: If a log or the evaluation is missing.
    """
    logs = [_read(path / "training_log.json", "train") for path in (target, draft)]
    evaluation = _read(target / "evaluation.json", "evaluate")
    config = _read(target / "config.json", "train")
    reports = evaluation["tasks"]
    card = _TARGET_CARD.format(
        vocab_size=config["vocab_size"],
        max_length=config["max_position_embeddings"],
        num_tasks=len(reports),
        practised=" and ".join(t.name for t in TRAINING_TASKS if t.practice_only),
        sizes=_sizes((target, draft), logs),
        training=_training(logs, evaluation["seed"]),
        prompt_weight=logs[0]["recipe"]["prompt_weight"],
        losses="\n".join(_losses(log) for log in logs),
        turns=LONG_CHAT_TURNS,
        answers=_answers(reports),
        lengths=" | ".join(f"k={length}" for length in DRAFT_LENGTHS),
        rules="|".join(["---"] * len(DRAFT_LENGTHS)),
        acceptance=_acceptance(reports),
    )
    (target / "README.md").write_text(card)
    (draft / "README.md").write_text(_DRAFT_CARD)


def _read(path: Path, command: str) -> dict[str, Any]:
    if not path.exists():
        raise ValueError(
            f"{path} is missing; run: python -m loadtest.demo_pair {command}"
        )
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _sizes(paths: Iterable[Path], logs: list[dict[str, Any]]) -> str:
    rows: list[list[object]] = [
        ["parameters", *(f"{log['num_parameters']:,}" for log in logs)]
    ]
    for name, key in (
        ("layers", "num_hidden_layers"),
        ("width", "hidden_size"),
        ("feed-forward width", "intermediate_size"),
        ("query heads", "num_attention_heads"),
        ("key-value heads", "num_key_value_heads"),
        ("head width", "head_dim"),
    ):
        rows.append([name, *(log["recipe"]["shape"][key] for log in logs)])
    sizes = [(path / "model.safetensors").stat().st_size for path in paths]
    rows.append(["weights (bfloat16)", *(f"{size / 1e6:.1f} MB" for size in sizes)])
    return "\n".join(map(_row, rows))


def _training(logs: list[dict[str, Any]], seed: int) -> str:
    rows: list[list[object]] = [["", "target", "draft"], ["---"] * 3]
    rows.append(["tokens seen", *(f"{log['num_tokens']:,}" for log in logs)])
    rows.append(["steps", *(_phases(log) for log in logs)])
    rows.append(["peak learning rate", *(log["recipe"]["peak_lr"] for log in logs)])
    rows.append(["time", *(f"{log['train_s'] / 60:.0f} min" for log in logs)])
    rows.append(["final loss", *(_final_loss(log) for log in logs)])
    rows.append(["seed", *(log["recipe"]["seed"] for log in logs)])
    hardware = logs[0]["hardware"]
    machine = (
        f"{hardware['cpu']}, {hardware['processes']} processes on {hardware['cores']}"
        f" cores, torch {hardware['torch']}. Evaluation seed {seed}."
    )
    return "\n".join(map(_row, rows)) + f"\n\nHardware: {machine}"


def _phases(log: dict[str, Any]) -> str:
    return ", then ".join(
        f"{p['num_steps']} of {p['num_rows']} x {p['row_length']}"
        for p in log["recipe"]["phases"]
    )


def _final_loss(log: dict[str, Any]) -> str:
    *_, last = log["losses"].values()
    return f"{last} ({log['loss']})"


def _losses(log: dict[str, Any], points: int = 10) -> str:
    losses = list(log["losses"].items())
    chosen = [losses[(len(losses) - 1) * n // (points - 1)] for n in range(points)]
    values = ", ".join(f"{loss} (step {step})" for step, loss in chosen)
    return f"- {log['recipe']['name']}: {values}"


def _answers(reports: dict[str, Any]) -> str:
    rows = []
    for name, report in reports.items():
        alone, late = report["num_prompts"]
        rows.append(
            [
                name,
                TASKS[name].difficulty,
                "exact" if TASKS[name].one_right_answer else "free",
                f"{report['right']:.1%}",
                f"{report['right_in_long_chat']:.1%}",
                f"{alone} + {late}",
                f"{report['mean_tokens']:.0f}",
            ]
        )
    return "\n".join(map(_row, rows))


def _acceptance(reports: dict[str, Any]) -> str:
    rows = []
    for name, report in reports.items():
        cells = [
            f"{entry['rate']:.2f} / {entry['length']:.2f}"
            for entry in report["acceptance"].values()
        ]
        rows.append([name, TASKS[name].difficulty, *cells])
    return "\n".join(map(_row, rows))
