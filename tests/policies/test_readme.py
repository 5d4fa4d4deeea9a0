"""The README's policy of one's own is complete, short, and keeps the contract."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import policies
from policies.registry import build_planner
from policies.testing import check_planner
from policies.types import PolicySpec

README = Path(policies.__file__).with_name("README.md")
NAME = "my_policies.threshold:Threshold"
MOST_LINES = 30


def find_python() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)


def test_the_selector_alone_answers_as_the_readme_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = find_python()[2]
    exec(compile(code, "README.md", "exec"), {})
    assert code.splitlines()[-1].endswith(f"# {capsys.readouterr().out.strip()}")


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the README's policy as a package outside the repository."""
    code = find_python()[0]
    assert len(code.splitlines()) <= MOST_LINES
    package = tmp_path / "my_policies"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "threshold.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_policies", "my_policies.threshold"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("own_package")
def test_the_policy_in_the_readme_passes_the_published_check() -> None:
    spec = PolicySpec(NAME, max_draft_tokens=4, params={"survival": 0.3})
    check_planner(lambda limits: build_planner(spec, limits), max_depth=4)


@pytest.mark.usefixtures("own_package")
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            PolicySpec(NAME, max_draft_tokens=4, params={"cut": 1}),
            "cannot be built from .*'cut'",
        ),
        (
            PolicySpec("my_policies.none:Threshold", max_draft_tokens=4),
            "cannot be imported: .*install",
        ),
        (
            PolicySpec("my_policies.threshold:Thresh", max_draft_tokens=4),
            "cannot be imported",
        ),
        (
            PolicySpec("my_policies.threshold:np", max_draft_tokens=4),
            "is no subclass of policies",
        ),
        (PolicySpec("my_policies", max_draft_tokens=4), "name a class as module:Class"),
        (PolicySpec("fixed", 4, params={"cut": 1}), "takes no params"),
    ],
)
def test_a_planner_that_cannot_be_had_is_named_with_the_fix(
    spec: PolicySpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_planner(spec)
