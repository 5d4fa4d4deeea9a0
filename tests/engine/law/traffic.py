"""Requests whose outputs are judged: one of every kind, in one batch."""

import random
from dataclasses import dataclass, field

from tests.engine.checks import FIRST_ORDINARY_TOKEN
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
    first, last = ("j", "9") if len(generated) % 2 else ("a", "I")
    return range(find_token(first), find_token(last) + 1)


def find_token(character):
    """Return the id of a character's token."""
    return FIRST_ORDINARY_TOKEN + ALPHABET.index(character)


@dataclass(frozen=True)
class Feature:
    """What sets a kind of request apart.

    Attributes:
        sampling: What shapes its law.
        is_seeded: Each request has a seed of its own.
    """

    sampling: Sampling = field(default_factory=Sampling)
    is_seeded: bool = False


FEATURES = {
    "plain": Feature(),
    "cool": Feature(Sampling(temperature=0.7)),
    "truncated": Feature(Sampling(temperature=1.2, top_k=32, top_p=0.998)),
    "seeded": Feature(is_seeded=True),
    "penalties": Feature(Sampling(repetition=1.3, presence=0.6, frequency=0.4)),
    "min_tokens": Feature(Sampling(min_tokens=20, stop_token_ids=STOP_TOKEN_IDS)),
    "stop_tokens": Feature(Sampling(stop_token_ids=STOP_TOKEN_IDS[:2])),
    "structured": Feature(Sampling(allowed=follow_grammar)),
    # Has no law to bet on, but tokens that are impossible.
    "greedy": Feature(Sampling(temperature=0.0)),
}


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
        return FEATURES[self.feature].sampling

    def make_params(self):
        """Build vLLM's sampling parameters."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        sampling = self.sampling
        extra_args = None
        if self.request_class is not None:
            extra_args = {"request_class": self.request_class}
        grammar = None
        if sampling.allowed is not None:
            grammar = StructuredOutputsParams(regex=GRAMMAR)
        return SamplingParams(
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            detokenize=False,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            repetition_penalty=sampling.repetition,
            presence_penalty=sampling.presence,
            frequency_penalty=sampling.frequency,
            min_tokens=sampling.min_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            structured_outputs=grammar,
            seed=self.seed if FEATURES[self.feature].is_seeded else None,
            extra_args=extra_args,
        )


def draw_requests(
    seed, num_each, *, long_prompts=False, classes=False, features=tuple(FEATURES)
):
    """Draw requests of every kind, one of each in turn.

    Args:
        seed: Of prompts, classes and the requests' own seeds.
        num_each: Requests of each kind.
        long_prompts: Of two to four chunks instead of less than one.
        classes: Whether requests belong to classes, by chance.
        features: Kinds to draw.
    """
    rng = random.Random(seed)
    shortest, longest = (CHUNK + 8, 4 * CHUNK - 4) if long_prompts else (3, CHUNK - 4)
    names = [None, *CLASSES] if classes else [None]
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
