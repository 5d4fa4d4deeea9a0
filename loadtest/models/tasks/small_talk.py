"""Small talk: short fixed replies, so that a greeting does not end in a table."""

from __future__ import annotations

import random

from .base import Exchange, Task, exchange
from .words import FORMS, NAMES

_OPENERS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day")


def _greet(rng: random.Random) -> Exchange:
    name, opener = rng.choice(NAMES), rng.choice(_OPENERS)
    if rng.random() < 0.3:
        opening = rng.choice((opener, f"{opener}, how are you?", f"{opener}!"))
        return exchange("greet", opening, "Hello! How can I help you?")
    form = rng.choice(FORMS["greet"])
    answer = f"Hello! So this is {name}. How can I help you?"
    return exchange("greet", form.format(opener, name), answer)


SMALL_TALK_TASKS = (Task("greet", "easy", True, _greet, 0.5),)
