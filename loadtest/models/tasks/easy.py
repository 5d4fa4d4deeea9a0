"""Easy tasks: once the prompt is read, nearly every token follows."""

from __future__ import annotations

import random
import string

from .base import Exchange, Task, exchange, numbered
from .words import CAPITALS, COLORS, FORMS, MONTHS, NOUNS, WEEKDAYS


def _count_up(rng: random.Random) -> Exchange:
    step = rng.choice((1, 1, 1, 2, 10))
    first = rng.randint(0, 70) if step < 10 else rng.randint(0, 3) * step
    last = first + step * rng.randint(4, (99 - first) // step if step > 1 else 25)
    by = "" if step == 1 else f" by {step}"
    form = rng.choice(FORMS["count_up"])
    answer = ", ".join(str(n) for n in range(first, last + 1, step)) + "."
    return exchange("count_up", form.format(first, last, by), answer)


def _count_down(rng: random.Random) -> Exchange:
    last = rng.randint(0, 70)
    first = last + rng.randint(4, 25)
    form = rng.choice(FORMS["count_down"])
    answer = ", ".join(str(n) for n in range(first, last - 1, -1)) + "."
    return exchange("count_down", form.format(first, last), answer)


def _spell(rng: random.Random) -> Exchange:
    words = rng.sample(NOUNS, rng.randint(1, 3))
    form = rng.choice(FORMS["spell"])
    answer = numbered([f"{word}: {'-'.join(word)}" for word in words])
    return exchange("spell", form.format(", ".join(words)), answer)


def _repeat(rng: random.Random) -> Exchange:
    word, times = rng.choice(NOUNS), rng.randint(3, 25)
    form = rng.choice(FORMS["repeat"])
    return exchange("repeat", form.format(word, times), numbered([word] * times))


def _times_table(rng: random.Random) -> Exchange:
    factor, rows = rng.randint(2, 10), rng.randint(3, 10)
    form = rng.choice(FORMS["times_table"])
    answer = numbered([f"{n} x {factor} = {n * factor}" for n in range(1, rows + 1)])
    return exchange("times_table", form.format(factor, rows), answer)


def _alphabet(rng: random.Random) -> Exchange:
    first = rng.randint(0, 20)
    last = rng.randint(first + 3, 25)
    letters = string.ascii_lowercase
    form = rng.choice(FORMS["alphabet"])
    answer = " ".join(letters[first : last + 1])
    return exchange("alphabet", form.format(letters[first], letters[last]), answer)


def _calendar(rng: random.Random) -> Exchange:
    kind, names = rng.choice((("weekdays", WEEKDAYS), ("months", MONTHS)))
    start, length = rng.randrange(len(names)), rng.randint(3, 14)
    form = rng.choice(FORMS["calendar"])
    answer = numbered([names[(start + n) % len(names)] for n in range(length)])
    return exchange("calendar", form.format(length, kind, names[start]), answer)


def _copy(rng: random.Random) -> Exchange:
    words = rng.sample(NOUNS, rng.randint(3, 16))
    form = rng.choice(FORMS["copy"])
    text = " ".join(words)
    return exchange("copy", form.format(text), f'Again: "{text}"')


def _pattern(rng: random.Random) -> Exchange:
    words = rng.sample(rng.choice((COLORS, NOUNS)), rng.randint(2, 4))
    length = rng.randint(5, 15)
    form = rng.choice(FORMS["pattern"])
    answer = numbered([words[n % len(words)] for n in range(length)])
    return exchange("pattern", form.format(", ".join(words * 2), length), answer)


def _capital(rng: random.Random) -> Exchange:
    country = rng.choice(sorted(CAPITALS))
    form = rng.choice(FORMS["capital"])
    answer = f"The capital of {country} is {CAPITALS[country]}."
    return exchange("capital", form.format(country), answer)


EASY_TASKS = (
    Task("count_up", "easy", True, _count_up),
    Task("count_down", "easy", True, _count_down),
    Task("spell", "easy", True, _spell, 1.5),
    Task("repeat", "easy", True, _repeat, 0.6),
    Task("times_table", "easy", True, _times_table),
    Task("alphabet", "easy", True, _alphabet, 0.7),
    Task("calendar", "easy", True, _calendar),
    Task("copy", "easy", True, _copy, 1.5),
    Task("pattern", "easy", True, _pattern, practice_only=True),
    Task("capital", "easy", True, _capital),
)
