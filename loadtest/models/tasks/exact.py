"""Tasks with one right answer.

Of the easy ones nearly every token follows once the prompt is read; the mixed ones are
fixed wording around values that have to be worked out. For some the model names a
function, reads its result and answers in a sentence.
"""

from __future__ import annotations

import json
import string
from calendar import monthrange
from datetime import date, timedelta
from functools import partial
from random import Random

from .base import Ask, Exchange, Message, Task, add_to, numbered, say
from .words import (
    CAPITALS,
    CITIES,
    COLORS,
    FORMS,
    MONTHS,
    NAMES,
    NOUNS,
    TEXTS,
    WEEKDAYS,
)

_YEAR = 2001
"""Of all dates: no leap year."""

EASY_TASKS: list[Task] = []
MIXED_TASKS: list[Task] = []
_easy = partial(add_to, EASY_TASKS, "easy")
_mixed = partial(add_to, MIXED_TASKS, "mixed")


@_easy()
def _count_up(rng: Random, ask: Ask) -> tuple[str, str]:
    step = rng.choice((1, 1, 1, 2, 10))
    first = rng.randint(0, 70) if step < 10 else rng.randint(0, 3) * step
    last = first + step * rng.randint(4, (99 - first) // step if step > 1 else 25)
    numbers = ", ".join(map(str, range(first, last + 1, step)))
    return ask(first, last, "" if step == 1 else f" by {step}"), f"{numbers}."


@_easy()
def _count_down(rng: Random, ask: Ask) -> tuple[str, str]:
    last = rng.randint(0, 70)
    first = last + rng.randint(4, 25)
    return ask(first, last), ", ".join(map(str, range(first, last - 1, -1))) + "."


@_easy(1.5)
def _spell(rng: Random, ask: Ask) -> tuple[str, str]:
    words = rng.sample(NOUNS, rng.randint(1, 3))
    return ask(", ".join(words)), numbered([f"{w}: {'-'.join(w)}" for w in words])


@_easy(0.6)
def _repeat(rng: Random, ask: Ask) -> tuple[str, str]:
    word, times = rng.choice(NOUNS), rng.randint(3, 25)
    return ask(word, times), numbered([word] * times)


@_easy()
def _times_table(rng: Random, ask: Ask) -> tuple[str, str]:
    factor, rows = rng.randint(2, 10), rng.randint(3, 10)
    lines = [f"{n} x {factor} = {n * factor}" for n in range(1, rows + 1)]
    return ask(factor, rows), numbered(lines)


@_easy(0.7)
def _alphabet(rng: Random, ask: Ask) -> tuple[str, str]:
    first = rng.randint(0, 20)
    letters = string.ascii_lowercase[first : rng.randint(first + 3, 25) + 1]
    return ask(letters[0], letters[-1]), " ".join(letters)


@_easy()
def _calendar(rng: Random, ask: Ask) -> tuple[str, str]:
    kind, names = rng.choice((("weekdays", WEEKDAYS), ("months", MONTHS)))
    start, length = rng.randrange(len(names)), rng.randint(3, 14)
    lines = [names[(start + n) % len(names)] for n in range(length)]
    return ask(length, kind, names[start]), numbered(lines)


@_easy(1.5)
def _copy(rng: Random, ask: Ask) -> tuple[str, str]:
    text = " ".join(rng.sample(NOUNS, rng.randint(3, 16)))
    return ask(text), f'Again: "{text}"'


@_easy(practice_only=True)
def _pattern(rng: Random, ask: Ask) -> tuple[str, str]:
    words = rng.sample(rng.choice((COLORS, NOUNS)), rng.randint(2, 4))
    length = rng.randint(5, 15)
    lines = [words[n % len(words)] for n in range(length)]
    return ask(", ".join(words * 2), length), numbered(lines)


@_easy()
def _capital(rng: Random, ask: Ask) -> tuple[str, str]:
    country = rng.choice(sorted(CAPITALS))
    return ask(country), f"The capital of {country} is {CAPITALS[country]}."


# So that a greeting does not end in a table.
@_easy(0.5)
def _greet(rng: Random, ask: Ask) -> tuple[str, str]:
    name, opener = rng.choice(NAMES), rng.choice(TEXTS["openers"])
    if rng.random() < 0.3:
        opening = rng.choice((opener, f"{opener}, how are you?", f"{opener}!"))
        return opening, "Hello! How can I help you?"
    return ask(opener, name), f"Hello! So this is {name}. How can I help you?"


@_mixed(2.0)
def _add(rng: Random, ask: Ask) -> tuple[str, str]:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return ask(a, b), f"The sum is {a + b}."


@_mixed(2.0)
def _subtract(rng: Random, ask: Ask) -> tuple[str, str]:
    a = rng.randint(2, 12)
    b = rng.randint(1, a)
    return ask(a, b), f"The difference is {a - b}."


@_mixed(3.0)
def _sort(rng: Random, ask: Ask) -> tuple[str, str]:
    digits = list(map(str, rng.sample(range(1, 10), 3)))
    return ask(", ".join(digits)), ", ".join(sorted(digits))


@_mixed(1.5)
def _convert(rng: Random, ask: Ask) -> tuple[str, str]:
    source, goal, factor = rng.choice(TEXTS["units"]).split()
    count = rng.randint(1, 12)
    return ask(count, source, goal), f"That is {count * int(factor)} {goal}."


@_mixed()
def _weekday(rng: Random, ask: Ask) -> tuple[str, str]:
    start, days = rng.randrange(7), rng.randint(1, 20)
    passed = [WEEKDAYS[(start + n) % 7] for n in range(1, days + 1)]
    answer = f"{numbered(passed)}\nIt will be {passed[-1]}."
    return ask(WEEKDAYS[start], days), answer


@_mixed()
def _dates(rng: Random, ask: Ask) -> tuple[str, str]:
    month = rng.randrange(12)
    day, length = rng.randint(1, monthrange(_YEAR, month + 1)[1]), rng.randint(2, 14)
    prompt, first = ask(length, day, MONTHS[month]), date(_YEAR, month + 1, day)
    days = [first + timedelta(n) for n in range(length)]
    return prompt, numbered([f"{one.day} {MONTHS[one.month - 1]}" for one in days])


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


@_mixed(1.5)
def _json_record(rng: Random, ask: Ask) -> tuple[str, str]:
    people = [_person(rng) for _ in range(rng.choice((1, 1, 2)))]
    rows = "; ".join(
        ", ".join(f"{key} {json.dumps(value)}" for key, value in row.items())
        for row in people
    )
    return ask(rows), "\n".join(map(json.dumps, people))


@_mixed(2.0)
def _read_record(rng: Random, ask: Ask) -> tuple[str, str]:
    record = _person(rng)
    key = rng.choice(sorted(record))
    return ask(json.dumps(record), key), f"The {key} is {json.dumps(record[key])}."


@_mixed(practice_only=True)
def _odd_even(rng: Random, ask: Ask) -> tuple[str, str]:
    number = rng.randint(1, 99)
    return ask(number), f"It is {'odd' if number % 2 else 'even'}."


def _scene(rng: Random) -> tuple[Message, ...]:
    """Write a question, a call, its result and the closing sentence."""
    arguments: dict[str, str | int]
    result: dict[str, str | int]
    if rng.choice(("get_weather", "set_timer")) == "get_weather":
        city, sky = rng.choice(CITIES), rng.choice(TEXTS["skies"])
        degrees, form = rng.randint(0, 35), rng.choice(FORMS["weather"])
        when = rng.choice(TEXTS["moments"])
        prompt, name, arguments = form.format(city, when), "get_weather", {"city": city}
        result = {"sky": sky, "degrees": degrees}
        sentence = f"It is {sky}, {degrees} degrees."
    else:
        minutes = rng.randint(1, 90)
        prompt = rng.choice(FORMS["timer"]).format(minutes)
        name, arguments = "set_timer", {"minutes": minutes}
        result, sentence = {"status": "started"}, "The timer is started."
    # As the chat template writes it (Hermes style).
    call = json.dumps({"name": name, "arguments": arguments})
    return (
        say("user", prompt),
        say("assistant", f"<tool_call>\n{call}\n</tool_call>"),
        say("tool", json.dumps(result)),
        say("assistant", sentence),
    )


# A call that nothing answers is rare in chats, so training meets it seldom.
TOOL_TASKS = (
    Task("tool_call", "mixed", True, lambda rng: Exchange(_scene(rng)[:2], True), 0.1),
    Task("tool_answer", "mixed", True, lambda rng: Exchange(_scene(rng), True), 1.5),
)
