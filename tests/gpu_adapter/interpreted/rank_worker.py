"""A worker of a tensor-parallel group that tells what its rank decided."""

import json
import os
from pathlib import Path

import torch
from vllm.distributed import get_tp_group

from tests.gpu_adapter.interpreted.worker import InterpretedWorker

DECISIONS_FOLDER = "TETRIS_TEST_DECISIONS"
"""Variable with the folder into which every rank writes what it admitted."""

DEVIATION = 0.3
"""By up to how much a second rank's own confidences are too small."""


class RankWorker(InterpretedWorker):
    """Its confidences differ from rank 0's: rounding may do the same on GPUs."""

    def compile_or_warm_up_model(self):
        """Warm up, then listen to the verification."""
        times = super().compile_or_warm_up_model()
        rank = get_tp_group().rank_in_group
        verification = self.model_runner.adaptive_verification
        if rank:
            deviate(verification)
        keep_decisions(verification, Path(os.environ[DECISIONS_FOLDER], str(rank)))
        return times


def deviate(verification):
    """Make the confidences differ before they are shared."""
    record = verification.record_confidences
    generator = torch.Generator().manual_seed(0)

    def record_other(confidence, input_batch):
        noise = torch.rand(confidence.shape, generator=generator)
        confidence.mul_(1 - DEVIATION * noise)
        record(confidence, input_batch)

    verification.record_confidences = record_other


def keep_decisions(verification, file):
    """Write a line for every step: how many drafts of each request stay."""
    reallocate = verification.reallocate_drafts

    def reallocate_and_tell(req_ids, *args):
        counts, *_ = verification._batch_budget
        offered = [counts[req_id] for req_id in req_ids]
        result = reallocate(req_ids, *args)
        admitted = verification._batch_draft_capacity[: len(req_ids)].tolist()
        with file.open("a") as lines:
            lines.write(json.dumps([req_ids, offered, admitted]) + "\n")
        return result

    verification.reallocate_drafts = reallocate_and_tell
