"""Exact conditional laws: what each token had to be drawn from, given those before."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot
from torch.nn.utils.rnn import pad_sequence

CLOSE = 2e-5
"""Probabilities whose order, or sum against `top_p`, is closer than this may come out
otherwise in the engine's float32; such positions are not judged. Whether one is hangs
on the prefix alone."""


@dataclass(frozen=True)
class Sampling:
    """What a request asks for, as far as it shapes the law of its tokens.

    But for `allowed`, vLLM's names.

    Attributes:
        temperature: 0 means argmax.
        top_k: Keep this many largest probabilities; 0 keeps all.
        top_p: Then keep the smallest set of largest ones that reaches this mass.
        min_tokens: `stop_token_ids` are barred from the output up to here.
        stop_token_ids: End the output.
        allowed: A grammar: the tokens allowed after those generated; None allows all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed: Callable | None = None


@dataclass
class Law:
    """The law of every token of one output.

    Attributes:
        target: `[num_tokens, vocab]`, float64. What each token had to be drawn from.
        raw: Same shape. The model's own distribution, as if nothing had been asked.
        is_certain: `[num_tokens]`, bool. False where rounding could change `target`.
    """

    target: torch.Tensor
    raw: torch.Tensor
    is_certain: torch.Tensor


@torch.no_grad()
def find_laws(model, prompts, outputs, samplings):
    """Compute the law of every token of every output in one forward pass.

    Of a causal model in float64; every output has a token at least.
    """
    whole = [
        torch.tensor([*prompt, *output])
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    # What fills up a row comes after all that counts.
    logits = model(pad_sequence(whole, batch_first=True)).logits
    laws = []
    for row, sampling in enumerate(samplings):
        first = len(prompts[row]) - 1
        own = logits[row, first : first + len(outputs[row])]
        laws.append(shape_law(own, prompts[row], outputs[row], sampling))
    return laws


def shape_law(logits, prompt, output, sampling):
    """Turn logits before each token of an output into laws.

    Args:
        logits: `[num_tokens, vocab]`, float64, of a model.
        prompt: Token ids.
        output: `[num_tokens]`, token ids.
        sampling: What the request asked for.
    """
    scores = _penalize(logits.clone(), prompt, output, sampling)
    if sampling.stop_token_ids:
        scores[: sampling.min_tokens, list(sampling.stop_token_ids)] = -torch.inf
    if sampling.allowed is not None:
        for index in range(len(output)):
            barred = torch.ones(scores.shape[1], dtype=torch.bool)
            barred[list(sampling.allowed(output[:index]))] = False
            scores[index, barred] = -torch.inf
    target, is_certain = truncate(scores, sampling)
    return Law(target, logits.softmax(dim=-1), is_certain)


def truncate(scores, sampling):
    """Apply temperature, top-k and top-p to logits.

    Args:
        scores: `[num_tokens, vocab]`, float64.
        sampling: What the request asked for.

    Returns:
        `[num_tokens, vocab]`, float64, rows sum to 1; and `[num_tokens]`, bool, whether
        each row is the same whatever the rounding.
    """
    if sampling.temperature == 0.0:
        best = scores.softmax(dim=-1).topk(2, dim=-1)
        is_certain = best.values[:, 0] - best.values[:, 1] > CLOSE
        return one_hot(best.indices[:, 0], scores.shape[1]).to(scores), is_certain
    scores, order = (scores / sampling.temperature).sort(dim=-1, descending=True)
    probs = scores.softmax(dim=-1)
    is_certain = torch.ones(len(probs), dtype=torch.bool)
    if sampling.top_k:
        gap = probs[:, sampling.top_k - 1] - probs[:, sampling.top_k]
        is_certain &= gap > CLOSE * probs[:, sampling.top_k - 1]
        probs[:, sampling.top_k :] = 0.0
        probs = probs / probs.sum(dim=-1, keepdim=True)
    if sampling.top_p < 1.0:
        mass_before = probs.cumsum(dim=-1) - probs
        is_certain &= ((mass_before - sampling.top_p).abs() > CLOSE).all(dim=-1)
        probs = probs.masked_fill(mass_before >= sampling.top_p, 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs), is_certain


def _penalize(logits, prompt, output, sampling):
    """Lower what has been in prompt or output before, in place."""
    chosen = one_hot(torch.tensor(output), logits.shape[1]).to(logits)
    # Before each token, how often every other one was in the output.
    counts = chosen.cumsum(dim=0) - chosen
    penalty = sampling.repetition_penalty
    if penalty != 1.0:
        was_there = counts > 0
        was_there[:, list(prompt)] = True
        factor = torch.where(logits > 0, 1 / penalty, penalty)
        logits = torch.where(was_there, logits * factor, logits)
    logits -= sampling.frequency_penalty * counts
    logits -= sampling.presence_penalty * (counts > 0)
    return logits
