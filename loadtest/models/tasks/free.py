"""Tasks with free choices, so that a reply cannot be foretold from its prompt.

Stories, letters and plans mix both kinds of token: fixed wording between choices
that are uniform over a word list. Dice, codes and random lists are choices only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from .base import Ask, Task, add_to, numbered
from .words import (
    ADJECTIVES,
    ANIMALS,
    CITIES,
    COLORS,
    NAMES,
    NOUNS,
    PLACES,
    TEXTS,
    WEEKDAYS,
)

FREE_TASKS: list[Task] = []
_task = partial(add_to, FREE_TASKS, one_right_answer=False)

_CODE_SIGNS = "ABCDEFGHJKLMNPQRSTUVWXYZ23456789"
_CHOICES: dict[str, Sequence[str]] = {
    "name": NAMES,
    "friend": NAMES,
    "animal": ANIMALS,
    "animal2": ANIMALS,
    "adj": ADJECTIVES,
    "color": COLORS,
    "place": PLACES,
    "noun": NOUNS,
    "noun2": NOUNS,
    "city": CITIES,
    "minutes": [str(n) for n in range(2, 60)],
}


def _fill(template: str, rng: Random, **given: str) -> str:
    """Fill a template with the given words and free choices for the others."""
    choices = {gap: rng.choice(words) for gap, words in _CHOICES.items()}
    return template.format(**(choices | given))


@_task("hard", 1.3)
def _story(rng: Random, ask: Ask) -> tuple[str, str]:
    name, animal = rng.choice(NAMES), rng.choice(ANIMALS)
    prompt = ask(name, animal)
    events = rng.choices(TEXTS["events"], k=rng.randint(3, 14))
    templates = [rng.choice(TEXTS["openings"]), *events, rng.choice(TEXTS["endings"])]
    text = " ".join(_fill(t, rng, name=name, animal=animal) for t in templates)
    return prompt, text


@_task("mixed", 0.7)
def _poem(rng: Random, ask: Ask) -> tuple[str, str]:
    noun, verses = rng.choice(NOUNS), rng.randint(1, 5)
    prompt = ask(verses, noun)
    text = "\n\n".join(
        f"Verse {n}/{verses}\n"
        + "\n".join(_fill(verse, rng) for verse in rng.sample(TEXTS["verses"], 3))
        + f"\nand still I think about the {noun}."
        for n in range(1, verses + 1)
    )
    return prompt, text


@_task("mixed", 0.7)
def _letter(rng: Random, ask: Ask) -> tuple[str, str]:
    reader, writer = rng.sample(NAMES, 2)
    prompt, day = ask(writer, reader), rng.choice(WEEKDAYS)
    body = [_fill(text, rng, day=day) for text in TEXTS["letter"]]
    ends = f"Dear {reader},", f"With best wishes from {writer}"
    return prompt, "\n".join([ends[0], *body, ends[1]])


@_task("hard", 0.7)
def _recipe(rng: Random, ask: Ask) -> tuple[str, str]:
    noun, count = rng.choice(NOUNS), rng.randint(3, 12)
    prompt = ask(noun, count)
    steps = [_fill(rng.choice(TEXTS["steps"]), rng) for _ in range(count)]
    text = f"Recipe for {noun} soup\n{numbered(steps)}\nEnjoy your {noun} soup!"
    return prompt, text


@_task("mixed", 0.7)
def _plan(rng: Random, ask: Ask) -> tuple[str, str]:
    name, start = rng.choice(NAMES), rng.randrange(7)
    prompt = ask(name, WEEKDAYS[start])
    days = [f"{WEEKDAYS[(start + n) % 7]}: {name} will " for n in range(7)]
    text = [f"{day}{_fill(rng.choice(TEXTS['activities']), rng)}." for day in days]
    return prompt, "\n".join(text)


@_task("hard", 0.6)
def _random_list(rng: Random, ask: Ask) -> tuple[str, str]:
    kind, words = rng.choice((("names", NAMES), ("words", NOUNS), ("cities", CITIES)))
    count = rng.randint(5, 40)
    return ask(count, kind), numbered(rng.choices(words, k=count))


@_task("hard", 0.6)
def _dice(rng: Random, ask: Ask) -> tuple[str, str]:
    sides, count = rng.choice((6, 8, 9)), rng.randint(5, 40)
    prompt = ask(sides, count)
    lines = [str(rng.randint(1, sides)) for _ in range(count)]
    return prompt, numbered(lines)


@_task("hard", 0.6)
def _codes(rng: Random, ask: Ask) -> tuple[str, str]:
    count, length = rng.randint(3, 20), rng.randint(4, 6)
    prompt = ask(count, length)
    lines = ["".join(rng.choices(_CODE_SIGNS, k=length)) for _ in range(count)]
    return prompt, numbered(lines)
