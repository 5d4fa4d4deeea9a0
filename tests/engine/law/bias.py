"""Engines that break the rule a little, so that a test can see it: controls only."""

from unittest.mock import patch

import torch
from torch.nn.functional import one_hot


def draw_from_draft(module, share, seed):
    """Draw a share of the tokens at verified positions from the draft's law.

    At positions chosen by chance the rejection sampler is shown the draft's law in the
    place of the target's, as far as the target could have emitted the tokens at all. So
    the law there is `(1 - share) * p + share * q`, and nothing impossible comes out.

    Args:
        module: Where one of vLLM's samplers looks up `rejection_sample`.
        share: 0-1.
        seed: Of the choice.
    """
    chance = torch.Generator().manual_seed(seed)
    rejection_sample = module.rejection_sample
    is_v1 = "cu_num_draft_tokens" in rejection_sample.__annotations__

    def sample_biased(*args, **kwargs):
        if is_v1:
            rows, drafts, target_logits = _read_v1(*args)
        else:
            rows, drafts, target_logits = _read_v2(*args)
        chosen = torch.rand(len(rows), generator=chance) < share
        rows, drafts = rows[chosen], drafts[chosen]
        could_be = target_logits[rows] > -torch.inf
        biased = torch.where(could_be, drafts.log(), -torch.inf)
        # Nothing is left of an argmax draft that the target rules out.
        is_left = biased.isfinite().any(dim=-1)
        target_logits[rows[is_left]] = biased[is_left]
        return rejection_sample(*args, **kwargs)

    return patch.object(module, "rejection_sample", sample_biased)


def _read_v1(
    draft_token_ids,
    num_draft_tokens,
    max_spec_len,
    cu_num_draft_tokens,
    draft_probs,
    target_logits,
    bonus_token_ids,
    sampling_metadata,
    **_,
):
    """Return the rows that are sampled, the draft's law there, the target's logits."""
    if sampling_metadata.all_greedy:
        rows = torch.zeros(0, dtype=torch.int64)
    else:
        counts = torch.tensor(num_draft_tokens)
        temperature = sampling_metadata.temperature.repeat_interleave(counts)
        rows = temperature.nonzero()[:, 0]
    if draft_probs is None:
        drafts = one_hot(draft_token_ids[rows].long(), target_logits.shape[1]).float()
    else:
        drafts = draft_probs[rows]
    return rows, drafts, target_logits


def _read_v2(
    target_logits,
    draft_logits,
    draft_sampled,
    cu_num_logits,
    pos,
    idx_mapping,
    expanded_idx_mapping,
    expanded_local_pos,
    temperature,
    *_,
):
    """Do as `_read_v1`; the last row of each request is its bonus token's."""
    temperature = temperature[expanded_idx_mapping.long()]
    is_sampled = temperature > 0
    is_sampled[cu_num_logits[1:].long() - 1] = False
    rows = is_sampled.nonzero()[:, 0]
    if draft_logits is None:
        drafted = draft_sampled[rows + 1].long()
        return rows, one_hot(drafted, target_logits.shape[1]).float(), target_logits
    places = expanded_idx_mapping[rows].long(), expanded_local_pos[rows].long()
    logits = draft_logits[places]
    drafts = (logits.float() / temperature[rows, None]).softmax(dim=-1)
    return rows, drafts, target_logits
