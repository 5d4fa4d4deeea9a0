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

from .chats import Chat, Pace, Say, WorkDir, cut_by_length, partial, read_shard

_BATCH_TOKENS = 2048


def compute_features(
    target: Path, work_dir: WorkDir, aux_layer_ids: tuple[int, ...], say: Say
) -> None:
    """Write the features of every shard that has none yet."""
    missing = [n for n in work_dir.shards() if not work_dir.features_of(n).exists()]
    if not missing:
        say("every shard has its features")
        return
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
    pace = Pace(len(missing), "shards with features")
    for done, shard in enumerate(missing, start=1):
        chats = read_shard(work_dir.chats_of(shard))
        features = _features_of(model, chats, aux_layer_ids)
        file = work_dir.features_of(shard)
        with partial(file).open("wb") as opened:
            np.save(opened, features.view(torch.int16).numpy())
        partial(file).replace(file)
        say(pace.tell(done))


@torch.inference_mode()
def _features_of(
    model: Any, chats: list[Chat], aux_layer_ids: tuple[int, ...]
) -> torch.Tensor:
    offsets = np.cumsum([0, *(len(chat.token_ids) for chat in chats)])
    width = (len(aux_layer_ids) + 1) * model.config.hidden_size
    features = torch.empty(int(offsets[-1]), width, dtype=torch.bfloat16)
    for batch in cut_by_length(chats, range(len(chats)), _BATCH_TOKENS):
        rows = [torch.tensor(chats[n].token_ids) for n in batch]
        # What pads a row stands at its end, where no token sees it.
        padded = pad_sequence(rows, batch_first=True)
        out = model.model(input_ids=padded, use_cache=False, output_hidden_states=True)
        states = [out.hidden_states[n] for n in aux_layer_ids] + [out.last_hidden_state]
        joined = torch.cat(states, dim=-1)
        for row, number in enumerate(batch):
            begin, end = offsets[number : number + 2]
            features[begin:end] = joined[row, : end - begin]
    return features
