"""Words, and texts with gaps for them, that the tasks draw from."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FILE = tomllib.loads(Path(__file__).with_name("texts.toml").read_text())
_WORDS: dict[str, tuple[str, ...]] = {
    kind: tuple(words.split()) for kind, words in _FILE["words"].items()
}
NOUNS, ANIMALS, NAMES = (_WORDS[kind] for kind in ("nouns", "animals", "names"))
CITIES, COLORS, PLACES = (_WORDS[kind] for kind in ("cities", "colors", "places"))
ADJECTIVES, WEEKDAYS, MONTHS = (
    _WORDS[kind] for kind in ("adjectives", "weekdays", "months")
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
CAPITALS: dict[str, str] = _FILE["capitals"]
"""By country."""

FORMS: dict[str, tuple[str, ...]] = {
    task: tuple(forms) for task, forms in _FILE["forms"].items()
}
"""What a prompt says, by what it is about."""

TEXTS: dict[str, tuple[str, ...]] = {
    kind: tuple(texts) for kind, texts in _FILE["texts"].items()
}
"""What free replies are made of, and what may stand before a chat."""
