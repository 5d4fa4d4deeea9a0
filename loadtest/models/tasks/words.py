"""Words, and texts with gaps for them, that the tasks draw from."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

_FILE = tomllib.loads(Path(__file__).with_name("texts.toml").read_text())
_WORDS: dict[str, list[str]] = {k: words.split() for k, words in _FILE["words"].items()}
NOUNS, ANIMALS, NAMES = (_WORDS[kind] for kind in ("nouns", "animals", "names"))
CITIES, COLORS, PLACES = (_WORDS[kind] for kind in ("cities", "colors", "places"))
ADJECTIVES, WEEKDAYS = _WORDS["adjectives"], _WORDS["weekdays"]
MONTHS = _WORDS["months"]

CAPITALS: dict[str, str] = _FILE["capitals"]
"""By country."""

FORMS: dict[str, list[str]] = _FILE["forms"]
"""What a prompt says, by what it is about."""

TEXTS: dict[str, list[str]] = _FILE["texts"]
"""What free replies are made of, and what may stand before a chat."""

TOOLS: tuple[dict[str, Any], ...] = tuple(_FILE["tools"])
"""What a chat may list, as OpenAI's API has it."""
