"""Cases of `tests.engine.law` on the V2 runner."""

from contextlib import contextmanager
from functools import partial

from vllm.v1.worker.gpu.spec_decode import rejection_sampler

from tests.engine.law import campaign
from tests.engine.law.bias import draw_from_draft
from tests.engine.law.engines import run_law_engine
from tests.engine.made_up import make_up_costs
from tests.gpu_adapter.interpreted.engines import run_interpreted

DRAFTER = "confused"
"""A draft that is wrong so often that few tokens, which are slow here, show a bias."""

run_case = partial(campaign.run_case, few_blocks=8, prepare=make_up_costs)
"""As on the V1 runner, for batches of about ten requests."""


@contextmanager
def start(folder, drafter=DRAFTER):
    """Start the engine on which all cases of a drafter are run."""
    with run_law_engine(
        run_interpreted,
        *campaign.write_models(folder, drafter),
        speculative=campaign.SAMPLED,
        max_num_seqs=32,
        max_num_batched_tokens=512,
    ) as engine:
        yield engine


def draw_some_from_draft(_):
    """Bias the rejection sampler of the V2 runner."""
    return draw_from_draft(rejection_sampler, campaign.SHARE, seed=1)
