"""Tasks with free choices, so that a reply cannot be foretold from its prompt.

Stories, letters and plans mix both kinds of token: fixed wording between choices
that are uniform over a word list. Dice, codes and random lists are choices only.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from .base import Exchange, Task, exchange, numbered
from .words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    FORMS,
    NAMES,
    NOUNS,
    PLACES,
    TEXTS,
    WEEKDAYS,
)

_CODE_SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"


def _fill(template: str, rng: random.Random, **given: str) -> str:
    """Fill a template with the given words and free choices for the others."""
    choices = {
        "name": rng.choice(NAMES),
        "friend": rng.choice(NAMES),
        "animal": rng.choice(ANIMALS),
        "animal2": rng.choice(ANIMALS),
        "adj": rng.choice(ADJECTIVES),
        "color": rng.choice(COLORS),
        "place": rng.choice(PLACES),
        "noun": rng.choice(NOUNS),
        "noun2": rng.choice(NOUNS),
        "city": rng.choice(CITIES),
        "minutes": str(rng.randint(2, 59)),
    }
    return template.format(**(choices | given))


def _mentions(*parts: str) -> Callable[[str], bool]:
    """Return a checker that wants every part in the reply."""
    return lambda reply: all(part in reply for part in parts)


def _lines_match(pattern: str, count: int) -> Callable[[str], bool]:
    """Return a checker for ``count`` numbered lines that match ``pattern``."""

    def accepts(reply: str) -> bool:
        lines = reply.strip().split("\n")
        return len(lines) == count and all(
            re.fullmatch(rf"{n}/{count}: (?:{pattern})", line)
            for n, line in enumerate(lines, start=1)
        )

    return accepts


def _story(rng: random.Random) -> Exchange:
    name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
    form = rng.choice(FORMS["story"])
    events = rng.choices(TEXTS["events"], k=rng.randint(3, 14))
    templates = [rng.choice(TEXTS["openings"]), *events, rng.choice(TEXTS["endings"])]
    text = " ".join(_fill(t, rng, name=name, animal=animal) for t in templates)
    accepts = _mentions(name, animal, "The end.")
    return exchange("story", form.format(name, animal), text, accepts)


def _poem(rng: random.Random) -> Exchange:
    noun, verses = rng.choice(NOUNS), rng.randint(1, 5)
    form = rng.choice(FORMS["poem"])
    text = "\n\n".join(
        f"Verse {n}/{verses}\n"
        + "\n".join(_fill(verse, rng) for verse in rng.sample(TEXTS["verses"], 3))
        + f"\nand still I think about the {noun}."
        for n in range(1, verses + 1)
    )
    accepts = _mentions(f"Verse {verses}/{verses}\n", f"about the {noun}.")
    return exchange("poem", form.format(verses, noun), text, accepts)


def _letter(rng: random.Random) -> Exchange:
    reader, writer = rng.sample(NAMES, 2)
    form = rng.choice(FORMS["letter"])
    body = [
        _fill(text, rng)
        for text in (
            "thank you very much for the {color} {noun} that you sent me last week.",
            "I am in {city} now, and the {place} here is {adj}.",
            "Next {day} I will meet {friend}, who has a {adj} {animal}.".replace(
                "{day}", rng.choice(WEEKDAYS)
            ),
            "Please do not forget the {noun} when you come to see me.",
        )
    ]
    text = f"Dear {reader},\n" + "\n".join(body) + f"\nWith best wishes from {writer}"
    accepts = _mentions(f"Dear {reader},", f"With best wishes from {writer}")
    return exchange("letter", form.format(writer, reader), text, accepts)


def _recipe(rng: random.Random) -> Exchange:
    noun, count = rng.choice(NOUNS), rng.randint(3, 12)
    form = rng.choice(FORMS["recipe"])
    steps = [_fill(rng.choice(TEXTS["steps"]), rng) for _ in range(count)]
    text = f"Recipe for {noun} soup\n{numbered(steps)}\nEnjoy your {noun} soup!"
    accepts = _mentions(f"\n{count}/{count}: ", f"Enjoy your {noun} soup!")
    return exchange("recipe", form.format(noun, count), text, accepts)


def _plan(rng: random.Random) -> Exchange:
    name, start = rng.choice(NAMES), rng.randrange(7)
    form = rng.choice(FORMS["plan"])
    days = [WEEKDAYS[(start + n) % 7] for n in range(7)]
    text = "\n".join(
        f"{day}: {name} will {_fill(rng.choice(TEXTS['activities']), rng)}."
        for day in days
    )
    accepts = _mentions(*(f"{day}: {name} will " for day in days))
    return exchange("plan", form.format(name, WEEKDAYS[start]), text, accepts)


def _random_list(rng: random.Random) -> Exchange:
    kind, words = rng.choice((("names", NAMES), ("words", NOUNS), ("cities", CITIES)))
    count = rng.randint(5, 40)
    form = rng.choice(FORMS["random_list"])
    text = numbered(rng.choices(words, k=count))
    accepts = _lines_match("|".join(words), count)
    return exchange("random_list", form.format(count, kind), text, accepts)


def _dice(rng: random.Random) -> Exchange:
    sides, count = rng.choice((6, 8, 9)), rng.randint(5, 40)
    form = rng.choice(FORMS["dice"])
    text = numbered([str(rng.randint(1, sides)) for _ in range(count)])
    accepts = _lines_match(f"[1-{sides}]", count)
    return exchange("dice", form.format(sides, count), text, accepts)


def _codes(rng: random.Random) -> Exchange:
    count, length = rng.randint(3, 20), rng.randint(4, 6)
    form = rng.choice(FORMS["codes"])
    text = numbered(["".join(rng.choices(_CODE_SIGNS, k=length)) for _ in range(count)])
    accepts = _lines_match(f"[{_CODE_SIGNS}]{{{length}}}", count)
    return exchange("codes", form.format(count, length), text, accepts)


FREE_TASKS = (
    Task("story", "hard", False, _story, 1.3),
    Task("poem", "mixed", False, _poem, 0.7),
    Task("letter", "mixed", False, _letter, 0.7),
    Task("recipe", "hard", False, _recipe, 0.7),
    Task("plan", "mixed", False, _plan, 0.7),
    Task("random_list", "hard", False, _random_list, 0.6),
    Task("dice", "hard", False, _dice, 0.6),
    Task("codes", "hard", False, _codes, 0.6),
)
