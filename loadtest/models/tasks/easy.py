"""Easy tasks: once the prompt is read, nearly every token follows."""

from __future__ import annotations

import string
from functools import partial
from random import Random

from .base import Ask, Task, add_to, numbered
from .words import CAPITALS, COLORS, MONTHS, NAMES, NOUNS, WEEKDAYS

EASY_TASKS: list[Task] = []
_task = partial(add_to, EASY_TASKS, "easy")

_OPENERS = ("Hello", "Hi", "Hey", "Good morning", "Good evening", "Good day")


@_task()
def _count_up(rng: Random, ask: Ask) -> tuple[str, str]:
    step = rng.choice((1, 1, 1, 2, 10))
    first = rng.randint(0, 70) if step < 10 else rng.randint(0, 3) * step
    last = first + step * rng.randint(4, (99 - first) // step if step > 1 else 25)
    numbers = map(str, range(first, last + 1, step))
    return ask(first, last, "" if step == 1 else f" by {step}"), ", ".join(
        numbers
    ) + "."


@_task()
def _count_down(rng: Random, ask: Ask) -> tuple[str, str]:
    last = rng.randint(0, 70)
    first = last + rng.randint(4, 25)
    return ask(first, last), ", ".join(map(str, range(first, last - 1, -1))) + "."


@_task(1.5)
def _spell(rng: Random, ask: Ask) -> tuple[str, str]:
    words = rng.sample(NOUNS, rng.randint(1, 3))
    return ask(", ".join(words)), numbered([f"{w}: {'-'.join(w)}" for w in words])


@_task(0.6)
def _repeat(rng: Random, ask: Ask) -> tuple[str, str]:
    word, times = rng.choice(NOUNS), rng.randint(3, 25)
    return ask(word, times), numbered([word] * times)


@_task()
def _times_table(rng: Random, ask: Ask) -> tuple[str, str]:
    factor, rows = rng.randint(2, 10), rng.randint(3, 10)
    lines = [f"{n} x {factor} = {n * factor}" for n in range(1, rows + 1)]
    return ask(factor, rows), numbered(lines)


@_task(0.7)
def _alphabet(rng: Random, ask: Ask) -> tuple[str, str]:
    first = rng.randint(0, 20)
    letters = string.ascii_lowercase[first : rng.randint(first + 3, 25) + 1]
    return ask(letters[0], letters[-1]), " ".join(letters)


@_task()
def _calendar(rng: Random, ask: Ask) -> tuple[str, str]:
    kind, names = rng.choice((("weekdays", WEEKDAYS), ("months", MONTHS)))
    start, length = rng.randrange(len(names)), rng.randint(3, 14)
    lines = [names[(start + n) % len(names)] for n in range(length)]
    return ask(length, kind, names[start]), numbered(lines)


@_task(1.5)
def _copy(rng: Random, ask: Ask) -> tuple[str, str]:
    text = " ".join(rng.sample(NOUNS, rng.randint(3, 16)))
    return ask(text), f'Again: "{text}"'


@_task(practice_only=True)
def _pattern(rng: Random, ask: Ask) -> tuple[str, str]:
    words = rng.sample(rng.choice((COLORS, NOUNS)), rng.randint(2, 4))
    length = rng.randint(5, 15)
    lines = [words[n % len(words)] for n in range(length)]
    return ask(", ".join(words * 2), length), numbered(lines)


@_task()
def _capital(rng: Random, ask: Ask) -> tuple[str, str]:
    country = rng.choice(sorted(CAPITALS))
    return ask(country), f"The capital of {country} is {CAPITALS[country]}."


# So that a greeting does not end in a table.
@_task(0.5)
def _greet(rng: Random, ask: Ask) -> tuple[str, str]:
    name, opener = rng.choice(NAMES), rng.choice(_OPENERS)
    if rng.random() < 0.3:
        opening = rng.choice((opener, f"{opener}, how are you?", f"{opener}!"))
        return opening, "Hello! How can I help you?"
    return ask(opener, name), f"Hello! So this is {name}. How can I help you?"
