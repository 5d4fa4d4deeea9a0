"""Where the pair lies, and every number that decides its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loadtest.environment import REPO

TARGET_DIR = REPO / "configs" / "models" / "demo-target"
DRAFT_DIR = REPO / "configs" / "models" / "demo-draft"


@dataclass(frozen=True)
class Phase:
    """Steps of one shape; chats fill all rows but `num_repeats` of random tokens."""

    num_steps: int
    num_rows: int
    row_length: int
    num_repeats: int = 0


@dataclass(frozen=True)
class Recipe:
    """How one model of the pair is trained: a Llama with tied embeddings.

    Attributes:
        shape: Its sizes, in transformers' words.
        seed: Of weights and data.
        decay_share: Share of all steps, at the end, of linear decay to zero.
        prompt_weight: Loss weight of tokens that the assistant did not write.
    """

    name: str
    shape: Mapping[str, int]
    phases: tuple[Phase, ...]
    peak_lr: float
    seed: int
    warmup_steps: int = 100
    decay_share: float = 0.4
    prompt_weight: float = 0.1

    @property
    def steps(self) -> list[Phase]:
        """The phase of every optimizer step."""
        return [phase for phase in self.phases for _ in range(phase.num_steps)]

    def learning_rate(self, step: int) -> float:
        """Warm up linearly, stay at the peak, then decay linearly to zero."""
        warmup = (step + 1) / self.warmup_steps
        decay = (1 - step / len(self.steps)) / self.decay_share
        return self.peak_lr * min(1.0, warmup, decay)


_SHAPE = (
    *("hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)

# Rows grow, so that at first a question has few others before it. Some of the short
# ones repeat random tokens: they keep the model's habit of copying alive until chats
# reward it. The rates are low for the same reason: three times as high, the circuit
# that copies is lost in the first hundred steps.
TARGET = Recipe(
    name="target",
    shape=dict(zip(_SHAPE, (256, 768, 5, 4, 2, 64), strict=True)),
    phases=(Phase(1500, 16, 128, 3), Phase(2200, 8, 512), Phase(150, 2, 2048)),
    peak_lr=1.2e-3,
    seed=1,
)
DRAFT = Recipe(
    name="draft",
    shape=dict(zip(_SHAPE, (128, 320, 2, 4, 2, 32), strict=True)),
    phases=(Phase(1500, 16, 128, 4), Phase(700, 8, 512), Phase(100, 2, 2048)),
    peak_lr=1.5e-3,
    seed=2,
)
