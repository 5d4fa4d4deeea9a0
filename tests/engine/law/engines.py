"""One engine for many cases: its policy, room and traffic change between batches."""

import itertools
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tests.engine.conftest import Engine
from tests.engine.law.judge import join
from tests.engine.law.models import load_reference
from tests.engine.law.recorder import Record, record
from tests.engine.law.traffic import CHUNK, CLASSES

DEPTH = 8

POLICIES: dict[str, dict[str, int]] = {
    "fixed": {"draft_tokens": DEPTH},
    "dynamic": {"max_draft_tokens": DEPTH},
    "tetris": {"draft_tokens": 3, "max_draft_tokens": DEPTH},
    "goodput": {"max_draft_tokens": DEPTH},
}

BLOCK_SIZE = 32
"""The smallest KV block of vLLM's CPU attention."""

DEPTHS_WITH_GAPS = (DEPTH, DEPTH, 0, 0, 3, DEPTH, 0, DEPTH, 1, 0, 0, 0)
"""How drafting is broken off: at depth 0 the drafter is left out; it resumes cold."""


@dataclass
class LawEngine:
    """An engine whose every block is recorded.

    Attributes:
        engine: The engine.
        reference: Its target, in float64.
        record: Of the latest batch.
    """

    engine: Engine
    reference: PreTrainedModel
    record: Record

    def set_policy(self, policy, make_up_costs=None):
        """Give the scheduler a new planner, as if it had been started with it.

        Args:
            policy: Its name.
            make_up_costs: Makes drafting pay on models as small as these; only for
                policies that ask what it costs.
        """
        self.engine.set_policy(policy, **POLICIES[policy])
        if make_up_costs is not None and policy in ("dynamic", "goodput"):
            make_up_costs(self.engine)

    @contextmanager
    def break_off_drafting(self):
        """Draft as deep as `DEPTHS_WITH_GAPS` says, whatever the policy wants."""
        depths = itertools.cycle(DEPTHS_WITH_GAPS)
        scheduler = self.engine.scheduler
        scheduler._choose_depth = lambda _num_reqs: next(depths)
        try:
            yield
        finally:
            del scheduler._choose_depth

    def run(self, requests, seed):
        """Complete requests in one batch.

        Args:
            requests: All sent at once.
            seed: Of whatever the engine draws.
        """
        self.record.clear()
        torch.manual_seed(seed)
        outputs = self.engine.llm.generate(
            [{"prompt_token_ids": list(request.prompt)} for request in requests],
            [request.make_params() for request in requests],
            use_tqdm=False,
        )
        return join(
            requests,
            [output.outputs[0].token_ids for output in outputs],
            [self.record.blocks.get(one.request_id, []) for one in outputs],
            self.reference,
        )


@contextmanager
def run_law_engine(start, target, draft, **options):
    """Start an engine as deep as any policy drafts here, and record its blocks.

    Args:
        start: Starts engines, as `run_engine` does.
        target: Folder of the target.
        draft: Folder of the draft; None for drafters that need none.
        **options: Of `start`.
    """
    with start(
        target,
        draft,
        policy="fixed",
        draft_tokens=DEPTH,
        classes=CLASSES,
        skip_tokenizer_init=False,
        max_model_len=4 * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        long_prefill_token_threshold=CHUNK,
        **options,
    ) as engine:
        yield LawEngine(engine, load_reference(target), record(engine))
