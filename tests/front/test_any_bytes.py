"""Bytes that nobody thought of: a front refuses them, and never fails.

Hypothesis makes them from bodies that once were trouble, and from those that are fine,
in `bodies/`: cut, joined, and with any bytes in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.front.any_bytes import Bodies, stream

FILES: Final = sorted(Path(__file__).with_name("bodies").iterdir())
SEEDS: Final = [file.read_bytes() for file in FILES]

# What JSON is made of, so that more than the first byte of a body is read.
PIECE: Final = st.sampled_from(
    [
        *(bytes([one]) for one in b'{}[]",:\\0-e'),
        b"null",
        b"NaN",
        b'"\\ud800"',
        b"1e999",
    ]
) | st.binary(max_size=4)


@pytest.fixture(scope="module")
def bodies() -> Iterator[Bodies]:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    running = Bodies()
    yield running
    running.close()


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Draw a body that was something once."""
    content = draw(st.sampled_from(SEEDS))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, min(start + 8, len(content))))
        content = content[:start] + draw(PIECE) + content[end:]
    return content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_was_trouble_once_is_refused(bodies, file):
    statuses = set(bodies.post(file.read_bytes()).values())
    assert (200 in statuses) == file.stem.startswith("good-")


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(contents())
def test_no_bytes_are_a_fault_of_the_server(bodies, content):
    assert max(bodies.post(content).values()) < 500


@settings(derandomize=True, database=None, deadline=None)
@given(st.text() | st.sampled_from(['"error"', 'data: {"error": 1}', "\n\ndata: "]))
def test_no_text_breaks_a_stream(text):
    stream(text.encode("utf-8", "replace"))
