"""Cases of `tests.engine.law` on the V2 runner."""

from contextlib import contextmanager
from functools import partial

from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from serving.engine.gpu.speculators import PacedStandalone
from serving.engine.reclass import reclass
from tests.engine.law import campaign
from tests.engine.law.bias import draw_from_draft
from tests.engine.made_up import make_up_costs
from tests.gpu_adapter.interpreted.engines import run_interpreted

DRAFTER = "confused"
"""A draft that is wrong so often that few tokens, which are slow here, show a bias."""

run_case = partial(campaign.run_case, few_blocks=8, prepare=make_up_costs)
"""As on the V1 runner, for batches of about ten requests."""


@contextmanager
def start(folder, drafter=DRAFTER, depth=campaign.DEPTH):
    """Start the engine on which all cases of a drafter are run."""
    with campaign.run_law_engine(
        run_interpreted,
        *campaign.write_models(folder, drafter),
        depth=depth,
        speculative=campaign.SAMPLED,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    ) as engine:
        yield engine


def draw_some_from_draft(_):
    """Bias the rejection sampler of the V2 runner."""
    return draw_from_draft(rejection_sampler, campaign.SHARE, seed=1)


class DrawnTokenDrafter(PacedStandalone):
    """Scores a draft by the probability of the token drawn: the paper's rule."""

    def sample_draft(self, *args, **kwargs):
        drawn = super().sample_draft(*args, **kwargs)
        _, _, idx_mapping, temperature, *_ = args
        step = int(self.current_draft_step)
        logits = self.draft_logits[idx_mapping, step].float()
        temperature = temperature[idx_mapping, None]
        temperature = temperature.masked_fill(temperature == 0, 1.0)
        probs = (logits / temperature).softmax(dim=-1)
        confidence = probs.gather(1, drawn[:, None].long())[:, 0]
        self.draft_token_confidence_probs[: len(drawn), step] = confidence
        return drawn


@contextmanager
def score_by_drawn_token(engine):
    """Rank drafts as the paper does: by what was drawn."""
    drafter = engine.engine.runner.speculator
    honest = type(drafter)
    reclass(drafter, DrawnTokenDrafter)
    try:
        yield
    finally:
        drafter.__class__ = honest
