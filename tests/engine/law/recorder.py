"""What each block of drafts was verified against, taken where tokens are sampled."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn.functional import one_hot

from tests.engine.checks import name_of


@dataclass
class Block:
    """Drafts of one request that were verified in one step.

    Attributes:
        start: Tokens of the output before the block.
        drafts: `[num_verified]`, token ids.
        laws: `[num_verified, vocab]`, float32. The draft's law, as the rejection
            sampler had it: one-hot where it was given none.
    """

    start: int
    drafts: list[int]
    laws: torch.Tensor

    def count_reached(self, output):
        """Count the drafts before which all were accepted: those that were judged."""
        for index, draft in enumerate(self.drafts):
            if self.start + index >= len(output):
                return index
            if output[self.start + index] != draft:
                return index + 1
        return len(self.drafts)


@dataclass
class Record:
    """What was recorded of an engine's steps since it was cleared.

    Attributes:
        blocks: Of every request, by its name, in the order of time.
        num_one_hot: Drafts verified without their law, as argmax drafts are, in steps
            that had something to sample.
        num_preempted: Requests that lost their KV blocks.
    """

    blocks: dict[str, list[Block]]
    num_one_hot: int = 0
    num_preempted: int = 0

    def clear(self):
        """Begin anew."""
        self.blocks.clear()
        self.num_one_hot = self.num_preempted = 0


def record(engine):
    """Record all blocks of an engine from now on."""
    recorded = Record(defaultdict(list))
    sampler = engine.runner.rejection_sampler
    if isinstance(sampler, torch.nn.Module):
        _record_v1(engine.runner, recorded)
    else:
        recording = _RecordingSampler(sampler, engine.runner, recorded)
        engine.runner.rejection_sampler = recording
    schedule = engine.scheduler.schedule

    def spy_on_schedule(*args, **kwargs):
        output = schedule(*args, **kwargs)
        recorded.num_preempted += len(output.preempted_req_ids or ())
        return output

    engine.scheduler.schedule = spy_on_schedule
    return recorded


def _record_v1(runner, recorded):
    def note(_sampler, args):
        metadata, draft_probs, logits, sampling = args[:4]
        drafts = metadata.draft_token_ids
        laws = draft_probs
        if laws is None:
            laws = one_hot(drafts.long(), logits.shape[1]).float()
            recorded.num_one_hot += 0 if sampling.all_greedy else len(drafts)
        counts, batch = metadata.num_draft_tokens, runner.input_batch
        parts = zip(drafts.split(counts), laws.split(counts), strict=True)
        for row, (own_drafts, own_laws) in enumerate(parts):
            if len(own_drafts):
                start = batch.num_tokens_no_spec[row] - batch.num_prompt_tokens[row]
                block = Block(int(start), own_drafts.tolist(), own_laws.clone())
                recorded.blocks[name_of(batch.req_ids[row])].append(block)

    runner.rejection_sampler.register_forward_pre_hook(note)


class _RecordingSampler:
    """Stands before the V2 runner's rejection sampler."""

    def __init__(self, inner, runner, recorded):
        self._inner, self._runner, self._recorded = inner, runner, recorded

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def __call__(self, logits, batch, draft_logits=None, *args):
        ends = batch.cu_num_logits.tolist()
        temperatures = self._inner.sampler.sampling_states.temperature.gpu
        lengths = self._runner.req_states.prompt_len.np
        for row, req_id in enumerate(batch.req_ids):
            first, count = ends[row], ends[row + 1] - ends[row] - 1
            if count <= 0:
                continue
            slot = int(batch.idx_mapping[row])
            tokens = batch.logits_indices[first : first + 1 + count]
            drafts = batch.input_ids[tokens[1:]].long()
            if draft_logits is None:
                laws = one_hot(drafts.clamp(min=0), logits.shape[1]).float()
                self._recorded.num_one_hot += count
            else:
                temperature = temperatures[slot] or 1.0
                laws = (draft_logits[slot, :count].float() / temperature).softmax(-1)
            start = int(batch.positions[tokens[0]]) + 1 - int(lengths[slot])
            block = Block(start, drafts.tolist(), laws.clone())
            self._recorded.blocks[name_of(req_id)].append(block)
        return self._inner(logits, batch, draft_logits, *args)
