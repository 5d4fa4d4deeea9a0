"""Repairs of vLLM's rejection sampler on the CPU, where C++ stands in for Triton.

vLLM 0.32 rewrites the per-request temperature, top-k and top-p of a batch to one value
per draft token with a kernel whose CPU stand-in writes into a temporary copy: the
rejection sampler then divides the target's logits by uninitialised memory, so that
every speculative step of a request with a temperature above 0 samples from garbage.

It also masks all but the top k of no rows at all, in every step without drafts such as
a prompt's, by looking for the largest k among none: an error that ends the engine.

What replaces rejected drafts it draws correctly but slowly (`recovery`).
"""

from __future__ import annotations

import torch

from serving.engine.compat_cpu import (
    KernelOverride,
    apply_top_k_top_p,
    rejection_sampler,
)
from serving.engine.cpu.recovery import sample_recovered_tokens


def expand_to_tokens(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    max_num_tokens: int | None = None,  # noqa: ARG001 - vLLM passes it
) -> None:
    """Repeat each request's value once per token, into `output`.

    Args:
        output: `[num_tokens]`, any dtype. Written in place.
        values: `[num_reqs]`, same dtype.
        cu_num_tokens: `[num_reqs]`, integer. Running total of tokens per request.
        replace_from: Value to be replaced where it occurs (temperature 0).
        replace_to: What replaces it.
        max_num_tokens: Ignored: the Triton kernel's tile size.
    """
    num_tokens = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(num_tokens))


def mask_rows(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Mask what top-k and top-p exclude, as vLLM does, also if there are no rows.

    Args:
        logits: `[num_tokens, vocab_size]`, may be changed in place.
        top_k: `[num_tokens]`, or None.
        top_p: `[num_tokens]`, or None.
    """
    if logits.shape[0] == 0:
        return logits
    masked: torch.Tensor = apply_top_k_top_p(logits, top_k, top_p)
    return masked


def repair_kernels() -> None:
    """Put what works in the place of vLLM's; idempotent.

    Set directly where it is launched: vLLM's registry looks through all modules for
    copies, and trips over those of llvmlite once the ngram drafter has compiled.
    """
    launcher = rejection_sampler._expand
    if launcher.kernel.func is not expand_to_tokens:
        launcher.kernel = KernelOverride(launcher.kernel, expand_to_tokens)
    rejection_sampler.apply_top_k_top_p = mask_rows
    rejection_sampler.sample_recovered_tokens = sample_recovered_tokens
