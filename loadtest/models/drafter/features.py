"""What a head learns from: the target's hidden states for every token of the chats.

One array a shard, [tokens, 4 x width]: the states before the layers that the head
reads, and the last state, of which the output layer makes the target's distribution.
bfloat16, which NumPy does not know, is kept as int16.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from .chats import Chat, Say, WorkDir, partial, read_shard

_BATCH_TOKENS = 2048


def compute_features(
    target: Path, work_dir: WorkDir, aux_layer_ids: tuple[int, ...], say: Say
) -> None:
    """Write the features of every shard that has none yet.

    Args:
        target: Model folder.
        work_dir: Holds the shards.
        aux_layer_ids: Layers whose input the head reads.
        say: Takes a line for each shard.
    """
    missing = [n for n in work_dir.shards() if not work_dir.features_of(n).exists()]
    if not missing:
        say("every shard has its features")
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    began_s, num_tokens = time.monotonic(), 0
    for done, shard in enumerate(missing, start=1):
        chats = read_shard(work_dir.chats_of(shard))
        features = _features_of(model, chats, aux_layer_ids)
        file = work_dir.features_of(shard)
        with partial(file).open("wb") as opened:
            np.save(opened, features.view(torch.int16).numpy())
        partial(file).replace(file)
        num_tokens += len(features)
        took_s = time.monotonic() - began_s
        left_min = took_s * (len(missing) - done) / done / 60
        say(
            f"features of {done}/{len(missing)} shards, {num_tokens / took_s:.0f} "
            f"tokens/s, {left_min:.0f} min left"
        )


@torch.inference_mode()
def _features_of(
    model: Any, chats: list[Chat], aux_layer_ids: tuple[int, ...]
) -> torch.Tensor:
    offsets = np.cumsum([0, *(len(chat.token_ids) for chat in chats)])
    width = (len(aux_layer_ids) + 1) * model.config.hidden_size
    features = torch.empty(int(offsets[-1]), width, dtype=torch.bfloat16)
    # By length, so that rows of a batch need little padding; what pads a row stands
    # at its end, where no token sees it.
    batch: list[int] = []
    order = sorted(range(len(chats)), key=lambda n: -len(chats[n].token_ids))
    for place, number in enumerate(order):
        batch.append(number)
        longest = len(chats[batch[0]].token_ids)
        if (len(batch) + 1) * longest <= _BATCH_TOKENS and place + 1 < len(order):
            continue
        rows = [chats[n].token_ids for n in batch]
        padded = [row + [0] * (longest - len(row)) for row in rows]
        out = model.model(
            input_ids=torch.tensor(padded), use_cache=False, output_hidden_states=True
        )
        states = [out.hidden_states[n] for n in aux_layer_ids] + [out.last_hidden_state]
        joined = torch.cat(states, dim=-1)
        for row, n in enumerate(batch):
            length = len(rows[row])
            features[offsets[n] : offsets[n] + length] = joined[row, :length]
        batch.clear()
    return features
