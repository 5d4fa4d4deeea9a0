"""Mixed tasks: fixed wording around values that have to be worked out."""

from __future__ import annotations

import json
import random

from .base import Exchange, Task, exchange, numbered
from .words import CITIES, COLORS, FORMS, MONTH_DAYS, MONTHS, NAMES, NOUNS, WEEKDAYS

_UNITS = (
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("hours", "minutes", 60),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
)


def _add(rng: random.Random) -> Exchange:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    form = rng.choice(FORMS["add"])
    return exchange("add", form.format(a, b), f"The sum is {a + b}.")


def _subtract(rng: random.Random) -> Exchange:
    a = rng.randint(2, 12)
    b = rng.randint(1, a)
    form = rng.choice(FORMS["subtract"])
    return exchange("subtract", form.format(a, b), f"The difference is {a - b}.")


def _sort(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 10), 3)
    form = rng.choice(FORMS["sort"])
    return exchange("sort", form.format(_listed(numbers)), _listed(sorted(numbers)))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _convert(rng: random.Random) -> Exchange:
    source, goal, factor = rng.choice(_UNITS)
    count = rng.randint(1, 12)
    form = rng.choice(FORMS["convert"])
    answer = f"That is {count * factor} {goal}."
    return exchange("convert", form.format(count, source, goal), answer)


def _weekday(rng: random.Random) -> Exchange:
    start, days = rng.randrange(7), rng.randint(1, 20)
    form = rng.choice(FORMS["weekday"])
    passed = [WEEKDAYS[(start + n) % 7] for n in range(1, days + 1)]
    answer = f"{numbered(passed)}\nIt will be {passed[-1]}."
    return exchange("weekday", form.format(WEEKDAYS[start], days), answer)


def _dates(rng: random.Random) -> Exchange:
    month = rng.randrange(12)
    day, length = rng.randint(1, MONTH_DAYS[month]), rng.randint(2, 14)
    form = rng.choice(FORMS["dates"])
    prompt = form.format(length, day, MONTHS[month])
    dates = []
    for _ in range(length):
        dates.append(f"{day} {MONTHS[month]}")
        day += 1
        if day > MONTH_DAYS[month]:
            day, month = 1, (month + 1) % 12
    return exchange("dates", prompt, numbered(dates))


def _person(rng: random.Random) -> dict[str, str | int]:
    fields: dict[str, str | int] = {
        "name": rng.choice(NAMES),
        "age": rng.randint(10, 99),
        "city": rng.choice(CITIES),
        "color": rng.choice(COLORS),
        "item": rng.choice(NOUNS),
    }
    kept = set(rng.sample(sorted(fields), rng.randint(2, 4)))
    return {key: value for key, value in fields.items() if key in kept}


def _json_record(rng: random.Random) -> Exchange:
    people = [_person(rng) for _ in range(rng.choice((1, 1, 2)))]
    rows = "; ".join(
        ", ".join(f"{key} {json.dumps(value)}" for key, value in row.items())
        for row in people
    )
    form = rng.choice(FORMS["json_record"])
    return exchange(
        "json_record", form.format(rows), "\n".join(map(json.dumps, people))
    )


def _read_record(rng: random.Random) -> Exchange:
    record = _person(rng)
    key = rng.choice(sorted(record))
    form = rng.choice(FORMS["read_record"])
    answer = f"The {key} is {json.dumps(record[key])}."
    return exchange("read_record", form.format(json.dumps(record), key), answer)


def _odd_even(rng: random.Random) -> Exchange:
    number = rng.randint(1, 99)
    form = rng.choice(FORMS["odd_even"])
    kind = "odd" if number % 2 else "even"
    return exchange("odd_even", form.format(number), f"It is {kind}.")


MIXED_TASKS = (
    Task("add", "mixed", True, _add, 2.0),
    Task("subtract", "mixed", True, _subtract, 2.0),
    Task("sort", "mixed", True, _sort, 3.0),
    Task("convert", "mixed", True, _convert, 1.5),
    Task("weekday", "mixed", True, _weekday),
    Task("dates", "mixed", True, _dates),
    Task("json_record", "mixed", True, _json_record, 1.5),
    Task("read_record", "mixed", True, _read_record, 2.0),
    Task("odd_even", "mixed", True, _odd_even, practice_only=True),
)
