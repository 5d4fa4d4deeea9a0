"""What a head learns from: the target's hidden states for every token of the chats.

One array a shard, [tokens, 4 x width]: the states before the layers that the head
reads, and the last state, of which the output layer makes the target's distribution.
bfloat16, which NumPy does not know, is kept as int16.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from .chats import Chat, Say, WorkDir, cut_by_length, read_shard, replacing

_BATCH_TOKENS = 2048


def compute_features(
    target: Path, work_dir: WorkDir, aux_layer_ids: tuple[int, ...], say: Say
) -> None:
    """Write the features of every shard that has none yet."""
    missing = [n for n in work_dir.shards() if not work_dir.features_of(n).exists()]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    for done, shard in enumerate(missing, start=1):
        chats = read_shard(work_dir.chats_of(shard))
        features = _features_of(model, chats, aux_layer_ids)
        with replacing(work_dir.features_of(shard)) as opened:
            np.save(opened, features.view(torch.int16).numpy())
        say(f"shard {shard} has features, {len(missing) - done} have none yet")


@torch.inference_mode()
def _features_of(
    model: Any, chats: list[Chat], aux_layer_ids: tuple[int, ...]
) -> torch.Tensor:
    rows: dict[int, torch.Tensor] = {}
    for batch in cut_by_length(chats, range(len(chats)), _BATCH_TOKENS):
        # What pads a row stands at its end, where no token sees it.
        tokens = [torch.tensor(chats[n].token_ids) for n in batch]
        padded = pad_sequence(tokens, batch_first=True)
        out = model.model(input_ids=padded, use_cache=False, output_hidden_states=True)
        states = [out.hidden_states[n] for n in aux_layer_ids] + [out.last_hidden_state]
        joined = torch.cat(states, dim=-1)
        rows |= {n: joined[row, : len(tokens[row])] for row, n in enumerate(batch)}
    return torch.cat([rows[n] for n in range(len(chats))])
