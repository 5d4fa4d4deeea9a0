"""What is asked in a storm: requests whose answers are known token by token."""

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import yaml

NUM_TOKENS: Final = 240
"""Of an answer: long enough to be under way when something dies."""

FEATURES: Final[dict[str, dict[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("features.yaml").read_text()
)
"""What a stream depends on beside its prompt, as fields of a request."""

PLAIN: Final = "plain"

SAMPLED: Final = "sampled"

LAW: Final = {"temperature": 1, "top_p": 1, "top_k": 0, "repetition_penalty": 1}
"""Of `SAMPLED`: tokens follow the model's own law, whatever its defaults are."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request.

    Attributes:
        kind: A feature, `PLAIN` or `SAMPLED`.
        number: Makes its prompt.
        tells_ties: Asks for the two likeliest of every token, too.
    """

    kind: str
    number: int
    tells_ties: bool = field(default=False, compare=False)

    @property
    def path(self) -> str:
        """Where it goes."""
        return f"/v1/{'chat/' * (self.kind == 'tools')}completions"

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are decided by the prompt alone."""
        return self.kind != SAMPLED and "temperature" not in self._feature

    @property
    def asks_logprobs(self) -> bool:
        """Whether log probabilities are a part of the answer that clients wait for."""
        return "logprobs" in self._feature

    @property
    def num_answers(self) -> int:
        """How many come back."""
        return 2 if self.kind in ("two answers", "two prompts") else 1

    @property
    def _feature(self) -> dict[str, Any]:
        return FEATURES.get(self.kind, {})

    def with_ties(self) -> "Case":
        """Return the case as it is to be asked where its answer is to be noted.

        Penalties move what is likeliest, which log probabilities do not show.
        """
        return replace(self, tells_ties=self.kind != "penalties")

    def body(self, model: str, seed: int) -> dict[str, Any]:
        """Return the request; the seed is that of `SAMPLED`."""
        text = f"Count from {self.number} to 90 and on:"
        request: dict[str, Any] = {"prompt": text}
        ties: dict[str, Any] = {"logprobs": 2}
        if self.kind == "tools":
            request = {"messages": [{"role": "user", "content": text}]}
            ties = {"logprobs": True, "top_logprobs": 2}
        if self.tells_ties:
            # Texts of tokens may be equal.
            request |= ties | {"return_tokens_as_token_ids": True}
        if self.kind == SAMPLED:
            request |= LAW | {"seed": seed}
        return {
            "model": model,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **request,
            **self._feature,
        }


def make_cases(num_prompts: int) -> list[Case]:
    """Return cases in the order they are sent: a third with a feature, one sampled."""
    features = itertools.cycle(FEATURES)
    kinds = itertools.cycle((PLAIN, SAMPLED, None))
    return [
        Case(kind or next(features), number)
        for number, kind in zip(range(num_prompts), kinds, strict=False)
    ]
