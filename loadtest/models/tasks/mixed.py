"""Mixed tasks: fixed wording around values that have to be worked out."""

from __future__ import annotations

import json
from functools import partial
from random import Random

from .base import Ask, Task, add_to, numbered
from .words import CITIES, COLORS, MONTH_DAYS, MONTHS, NAMES, NOUNS, WEEKDAYS

MIXED_TASKS: list[Task] = []
_task = partial(add_to, MIXED_TASKS, "mixed")

_UNITS = (
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("hours", "minutes", 60),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
)


@_task(2.0)
def _add(rng: Random, ask: Ask) -> tuple[str, str]:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return ask(a, b), f"The sum is {a + b}."


@_task(2.0)
def _subtract(rng: Random, ask: Ask) -> tuple[str, str]:
    a = rng.randint(2, 12)
    b = rng.randint(1, a)
    return ask(a, b), f"The difference is {a - b}."


@_task(3.0)
def _sort(rng: Random, ask: Ask) -> tuple[str, str]:
    digits = list(map(str, rng.sample(range(1, 10), 3)))
    return ask(", ".join(digits)), ", ".join(sorted(digits))


@_task(1.5)
def _convert(rng: Random, ask: Ask) -> tuple[str, str]:
    source, goal, factor = rng.choice(_UNITS)
    count = rng.randint(1, 12)
    return ask(count, source, goal), f"That is {count * factor} {goal}."


@_task()
def _weekday(rng: Random, ask: Ask) -> tuple[str, str]:
    start, days = rng.randrange(7), rng.randint(1, 20)
    passed = [WEEKDAYS[(start + n) % 7] for n in range(1, days + 1)]
    answer = f"{numbered(passed)}\nIt will be {passed[-1]}."
    return ask(WEEKDAYS[start], days), answer


@_task()
def _dates(rng: Random, ask: Ask) -> tuple[str, str]:
    month = rng.randrange(12)
    day, length = rng.randint(1, MONTH_DAYS[month]), rng.randint(2, 14)
    prompt, dates = ask(length, day, MONTHS[month]), []
    for _ in range(length):
        dates.append(f"{day} {MONTHS[month]}")
        day += 1
        if day > MONTH_DAYS[month]:
            day, month = 1, (month + 1) % 12
    return prompt, numbered(dates)


def _person(rng: Random) -> dict[str, str | int]:
    fields: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
        "item": rng.choice(NOUNS),
    }
    kept = set(rng.sample(sorted(fields), rng.randint(2, 4)))
    return {key: value for key, value in fields.items() if key in kept}


@_task(1.5)
def _json_record(rng: Random, ask: Ask) -> tuple[str, str]:
    people = [_person(rng) for _ in range(rng.choice((1, 1, 2)))]
    rows = "; ".join(
        ", ".join(f"{key} {json.dumps(value)}" for key, value in row.items())
        for row in people
    )
    return ask(rows), "\n".join(map(json.dumps, people))


@_task(2.0)
def _read_record(rng: Random, ask: Ask) -> tuple[str, str]:
    record = _person(rng)
    key = rng.choice(sorted(record))
    return ask(json.dumps(record), key), f"The {key} is {json.dumps(record[key])}."


@_task(practice_only=True)
def _odd_even(rng: Random, ask: Ask) -> tuple[str, str]:
    number = rng.randint(1, 99)
    return ask(number), f"It is {'odd' if number % 2 else 'even'}."
