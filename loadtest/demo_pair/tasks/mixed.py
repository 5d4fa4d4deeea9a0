"""Mixed tasks: fixed wording around values that have to be worked out."""

from __future__ import annotations

import json
import random

from .base import Exchange, Task, exchange, numbered
from .words import CITIES, COLORS, MONTH_DAYS, MONTHS, NAMES, NOUNS, WEEKDAYS

_UNITS = (
    ("km", "m", 1000),
    ("m", "cm", 100),
    ("cm", "mm", 10),
    ("kg", "g", 1000),
    ("hours", "minutes", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("feet", "inches", 12),
)


def _sum_line(a: int, b: int) -> str:
    """Add column by column, so that every step is a one-digit sum."""
    units, tens = a % 10 + b % 10, a // 10 + b // 10
    carried = tens + units // 10
    return (
        f"{a} + {b}: units {a % 10} + {b % 10} = {units},"
        f" tens {a // 10} + {b // 10} + {units // 10} = {carried}, sum {a + b}"
    )


def _add(rng: random.Random) -> Exchange:
    pairs = [
        (rng.randint(10, 99), rng.randint(10, 99))
        for _ in range(rng.choice((1, 1, 2, 4)))
    ]
    form = rng.choice(("What is {}?", "Add {}.", "Work out {}."))
    prompt = form.format(" and ".join(f"{a} + {b}" for a, b in pairs))
    return exchange("add", prompt, "\n".join(_sum_line(a, b) for a, b in pairs))


def _subtract(rng: random.Random) -> Exchange:
    pairs = []
    for _ in range(rng.choice((1, 2, 3))):
        a = rng.randint(2, 20)
        pairs.append((a, rng.randint(1, a)))
    form = rng.choice(("What is {}?", "Work out {}.", "Subtract: {}."))
    prompt = form.format(" and ".join(f"{a} - {b}" for a, b in pairs))
    return exchange(
        "subtract", prompt, "\n".join(f"{a} - {b} = {a - b}" for a, b in pairs)
    )


def _sort(rng: random.Random) -> Exchange:
    rows = [
        rng.sample(range(1, 100), rng.randint(3, 5))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    order = rng.choice(("smallest", "largest"))
    form = rng.choice(("Sort {}, {} first.", "Put {} in order, {} first."))
    unsorted = "; ".join(_listed(row) for row in rows)
    answer = "\n".join(_listed(sorted(row, reverse=order == "largest")) for row in rows)
    return exchange("sort", form.format(unsorted, order), answer)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _convert(rng: random.Random) -> Exchange:
    source, goal, factor = rng.choice(_UNITS)
    first = rng.randint(1, 12)
    last = first + rng.randint(0, 8)
    form = rng.choice(("Convert {} to {} {} to {}.", "Table from {} to {} {} in {}."))
    prompt = form.format(first, last, source, goal)
    answer = "\n".join(
        f"{n} {source} = {n * factor} {goal}" for n in range(first, last + 1)
    )
    return exchange("convert", prompt, answer)


def _weekday(rng: random.Random) -> Exchange:
    start, days = rng.randrange(7), rng.randint(1, 20)
    form = rng.choice(
        (
            "Today is {}. What day is it in {} days?",
            "It is {} now. Which day comes {} days later?",
            "If it is {}, what will it be in {} days?",
            "From {}, go {} days on.",
        )
    )
    passed = [WEEKDAYS[(start + n) % 7] for n in range(1, days + 1)]
    answer = f"{numbered(passed)}\nIt will be {passed[-1]}."
    return exchange("weekday", form.format(WEEKDAYS[start], days), answer)


def _dates(rng: random.Random) -> Exchange:
    month = rng.randrange(12)
    day, length = rng.randint(1, MONTH_DAYS[month]), rng.randint(2, 14)
    form = rng.choice(("List {} dates from {} {}.", "Write {} days starting on {} {}."))
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
    kept = set(rng.sample(sorted(fields), rng.randint(2, 5)))
    return {key: value for key, value in fields.items() if key in kept}


def _json_record(rng: random.Random) -> Exchange:
    people = [_person(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    rows = "; ".join(
        ", ".join(f"{key} {json.dumps(value)}" for key, value in row.items())
        for row in people
    )
    form = rng.choice(("Write as JSON: {}.", "Make JSON records from: {}."))
    return exchange(
        "json_record", form.format(rows), "\n".join(map(json.dumps, people))
    )


def _read_record(rng: random.Random) -> Exchange:
    record = _person(rng)
    keys = rng.sample(sorted(record), rng.randint(1, len(record)))
    form = rng.choice(("Read {1} from {0}", "Here is {0} Tell me {1}."))
    answer = "\n".join(f"The {key} is {json.dumps(record[key])}." for key in keys)
    prompt = form.format(json.dumps(record), " and ".join(keys))
    return exchange("read_record", prompt, answer)


def _reverse(rng: random.Random) -> Exchange:
    words = rng.sample(NOUNS, rng.randint(2, 6))
    form = rng.choice(("Reverse the list {}.", "Write {} backwards."))
    answer = "Backwards: " + ", ".join(words[::-1])
    return exchange("reverse", form.format(", ".join(words)), answer)


def _odd_even(rng: random.Random) -> Exchange:
    numbers = rng.sample(range(1, 100), rng.randint(2, 10))
    form = rng.choice(("Odd or even: {}?", "Tell odd from even: {}."))
    answer = "\n".join(f"{n} is {'odd' if n % 2 else 'even'}" for n in numbers)
    return exchange("odd_even", form.format(", ".join(map(str, numbers))), answer)


MIXED_TASKS = (
    Task("add", "mixed", True, _add, 1.5),
    Task("subtract", "mixed", True, _subtract),
    Task("sort", "mixed", True, _sort, 2.0),
    Task("convert", "mixed", True, _convert),
    Task("weekday", "mixed", True, _weekday),
    Task("dates", "mixed", True, _dates),
    Task("json_record", "mixed", True, _json_record, 1.5),
    Task("read_record", "mixed", True, _read_record, 2.0),
    Task("reverse", "mixed", True, _reverse, 2.0),
    Task("odd_even", "mixed", True, _odd_even, 0.8),
)
