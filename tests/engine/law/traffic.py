"""Requests whose outputs are judged: one of every kind, in one batch."""

import random
from dataclasses import dataclass

from tests.engine.checks import FIRST_ORDINARY_TOKEN, greedy
from tests.engine.law.laws import Sampling
from tests.engine.tiny_models import ALPHABET, VOCAB_SIZE

MAX_TOKENS = 32

CHUNK = 16
"""Prompts longer than this are computed in chunks; long ones here are."""

STOP_TOKEN_IDS = (5, 17, 29, 41, 53)

GRAMMAR = "([a-zA-I][j-zA-I0-9]){32}"
"""Of more characters than are emitted, so that it never ends a request."""

CLASSES = {
    "gold": {"weight": 4.0},
    "prompt": {"weight": 1.0, "latency_target_ms": 40.0},
}


def follow_grammar(generated):
    """Return the token ids that `GRAMMAR` allows next."""
    ends = "j9" if len(generated) % 2 else "aI"
    first, last = (FIRST_ORDINARY_TOKEN + ALPHABET.index(end) for end in ends)
    return range(first, last + 1)


FEATURES = {
    "plain": Sampling(),
    "cool": Sampling(temperature=0.7),
    "truncated": Sampling(temperature=1.2, top_k=32, top_p=0.998),
    # Each request has a seed of its own.
    "seeded": Sampling(),
    "penalties": Sampling(
        repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.4
    ),
    "min_tokens": Sampling(min_tokens=20, stop_token_ids=STOP_TOKEN_IDS),
    "stop_tokens": Sampling(stop_token_ids=STOP_TOKEN_IDS[:2]),
    "structured": Sampling(allowed=follow_grammar),
    # Has no law to bet on, but tokens that are impossible.
    "greedy": Sampling(temperature=0.0),
}
"""What shapes the law of each kind of request."""


@dataclass(frozen=True)
class LawRequest:
    """One request and what its output has to follow."""

    feature: str
    prompt: tuple[int, ...]
    seed: int
    request_class: str | None = None

    @property
    def sampling(self):
        """What shapes its law."""
        return FEATURES[self.feature]

    def make_params(self):
        """Build vLLM's sampling parameters."""
        from vllm.sampling_params import StructuredOutputsParams

        shape = dict(vars(self.sampling))
        more = {"stop_token_ids": list(shape.pop("stop_token_ids"))}
        if shape.pop("allowed") is not None:
            more["structured_outputs"] = StructuredOutputsParams(regex=GRAMMAR)
        if self.feature == "seeded":
            more["seed"] = self.seed
        if self.request_class is not None:
            more["extra_args"] = {"request_class": self.request_class}
        return greedy(MAX_TOKENS, **shape, **more)


def draw_requests(seed, num_each, case, features):
    """Draw requests of every kind, one of each in turn.

    Args:
        seed: Of prompts, classes and the requests' own seeds.
        num_each: Requests of each kind.
        case: Says whether prompts are of two to four chunks instead of less than one,
            and whether requests belong to classes, by chance.
        features: Kinds to draw.
    """
    rng, names = random.Random(seed), [None, *CLASSES] if case.classes else [None]
    shortest, longest = 3, CHUNK - 4
    if case.long_prompts:
        shortest, longest = CHUNK + 8, 4 * CHUNK - 4
    return [
        LawRequest(
            feature=feature,
            prompt=tuple(
                rng.randrange(FIRST_ORDINARY_TOKEN, VOCAB_SIZE)
                for _ in range(rng.randint(shortest, longest))
            ),
            seed=rng.getrandbits(31),
            request_class=rng.choice(names),
        )
        for _ in range(num_each)
        for feature in features
    ]
