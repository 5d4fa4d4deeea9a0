"""What is asked in a storm: requests whose answers are known token by token."""

import itertools
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a feature or `PLAIN`, and the number that makes its prompt."""

    kind: str
    number: int

    @property
    def path(self) -> str:
        """Where it goes."""
        return f"/v1/{'chat/' * (self.kind == 'tools')}completions"

    @property
    def is_greedy(self) -> bool:
        """Whether its tokens are decided by the prompt alone."""
        return "temperature" not in FEATURES.get(self.kind, {})

    @property
    def num_answers(self) -> int:
        """How many come back."""
        return 2 if self.kind in ("two answers", "two prompts") else 1

    def body(self, model: str) -> dict[str, Any]:
        """Return the request."""
        text = f"Count from {self.number} to 90 and on:"
        prompt: dict[str, Any] = {"prompt": text}
        if self.kind == "tools":
            prompt = {"messages": [{"role": "user", "content": text}]}
        return {
            "model": model,
            **prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **FEATURES.get(self.kind, {}),
        }


def make_cases(num_prompts: int) -> list[Case]:
    """Return cases in the order they are sent: one in three with a feature."""
    features = itertools.cycle(FEATURES)
    return [
        Case(next(features) if number % 3 == 2 else PLAIN, number)
        for number in range(num_prompts)
    ]
