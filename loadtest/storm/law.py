"""Whether sampled streams follow the model's law after a replay, with noise of its own.

A score test of all tokens from the cut on: under its law a token's log probability has
a known mean and variance, whatever came before, so that the sum of what they are off by
is normal.

And one of the noise. An engine begins a request's noise at its seed: with the client's
seed a replay would draw its first token by the noise of the stream's very first, which
no law of a single token shows. The server says what it would draw, being asked to go on
from the tokens before the cut with that seed. A gambler stakes half of his money on
that token, and wins as much as it is unlikely. If the noise is fresh, that his money
ever multiplies by 10,000 has a probability of 1 in 10,000 (Ville's inequality). The
control is what he wins if the replays were those answers.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import yaml

from .cases import LAW, SAMPLED
from .streams import Stream

if TYPE_CHECKING:
    import torch

_STAKE: Final = 0.5
_ALARM_LOG10_E: Final = 4.0
_ALARM_Z: Final = 4.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """A sampled stream that was replayed once.

    Attributes:
        before: Token ids of the prompt, and what came before the cut.
        after: What came then.
        cut: Number of tokens before it.
        seed: The client's.
    """

    before: list[int]
    after: list[int]
    cut: int
    seed: int


def find_replayed(
    streams: Iterable[Stream],
    kills: Sequence[Mapping[str, Any]],
    replays: Mapping[str, int],
) -> list[Replayed]:
    """Return what is known to have been replayed at which token, and not at the first.

    That token is the first after the gap which the kill has made.
    """
    found = []
    for one in streams:
        if one.case.kind != SAMPLED or one.error or replays.get(one.request_id) != 1:
            continue
        kills_s = (kill["at_s"] for kill in kills if kill["kind"] != "front")
        gaps = [at for at_s in kills_s if (at := one.find_gap(at_s)) is not None]
        ids = one.token_ids[0]
        cut = one.num_until[gaps[0]] if len(gaps) == 1 else 0
        if 0 < cut < len(ids):
            before = [*one.prompt_ids, *ids[:cut]]
            found.append(Replayed(before, ids[cut:], cut, one.seed))
    return found


def judge_law(
    replayed: Sequence[Replayed], ask: Callable[[list[int], int], int], target: str
) -> dict[str, Any]:
    """Return evidence against the law, and whether it holds.

    Args:
        replayed: From `find_replayed`.
        ask: Returns the token that an engine draws next with a fresh seed.
        target: Folder or name of the model, which is loaded in float32.

    Returns:
        `streams` and `tokens`; `z` of the score test; the logarithm of the gambler's
        money, `same_noise_log10_e`, and of the control's, `naive_replay_log10_e`;
        whether all `holds`, and the `control_fails`, as it must for that to mean
        anything; and how many first tokens are `as_derived` seeds have them: nearly
        all, or the cuts are not where they were taken to be.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    score = variance = won = control = 0.0
    num_tokens = num_as_derived = 0
    for one in replayed:
        with torch.inference_mode():
            logits = model(torch.tensor([one.before + one.after])).logits[0]
        law = logits[len(one.before) - 1 : -1].double().log_softmax(dim=-1)
        own, spread = score_tokens(law, one.after)
        score, variance = score + own, variance + spread
        same = ask(one.before, one.seed)
        chance = math.exp(float(law[0, same]))
        won += _win(one.after[0] == same, chance)
        control += _win(True, chance)
        derived = ask(one.before, derive_seed(one.seed, one.cut))
        num_as_derived += one.after[0] == derived
        num_tokens += len(one.after)
    z = score / math.sqrt(variance) if variance else 0.0
    return {
        "streams": len(replayed),
        "tokens": num_tokens,
        "z": round(z, 2),
        "same_noise_log10_e": round(won, 2),
        "naive_replay_log10_e": round(control, 2),
        "as_derived": num_as_derived,
        "holds": abs(z) < _ALARM_Z and won < _ALARM_LOG10_E,
        "control_fails": control > _ALARM_LOG10_E,
    }


def score_tokens(law: "torch.Tensor", ids: Sequence[int]) -> tuple[float, float]:
    """Return what tokens' log probabilities are above their means, and the variance.

    Args:
        law: `[num_tokens, vocab]`, float64, log probabilities.
        ids: `[num_tokens]`, what came out.
    """
    chances = law.exp()
    means = (chances * law).sum(dim=-1)
    variances = (chances * law**2).sum(dim=-1) - means**2
    scores = law[list(range(len(ids))), list(ids)] - means
    return float(scores.sum()), float(variances.sum())


def _win(is_same: bool, chance: float) -> float:
    return math.log10(1 - _STAKE + _STAKE * is_same / chance)


def derive_seed(seed: int, num_emitted: int) -> int:
    """Return the seed with which a front lets another engine go on.

    As `serving.front.in_flight` does, which a test compares.
    """
    text = f"{seed} {num_emitted}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1


def draw_next(url: str, model: str, ids: list[int], seed: int) -> int:
    """Return the first token that the server draws after a prompt of ids."""
    body = {"model": model, "prompt": ids, "max_tokens": 1, "seed": seed, **LAW}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    return int(answer.raise_for_status().json()["choices"][0]["token_ids"][0])


def find_target(config: Path) -> str:
    """Return the target that a deployment file names: a folder beside it, or a name."""
    target = str(yaml.safe_load(config.read_text())["model"]["target"])
    folder = config.parent / target
    return str(folder) if folder.is_dir() else target
