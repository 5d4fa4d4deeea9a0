"""Private names of vLLM and Ray that the front leans on are still there."""

from importlib import import_module

import pytest

from serving import compat_ray
from serving.engine import compat


def test_every_name_of_ray_is_there() -> None:
    assert compat_ray.find_missing_names() == []


def test_a_name_of_ray_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = "ray.serve:nothing_of_that_name"
    monkeypatch.setitem(compat_ray.FRONT_NAMES, moved, "a test")
    assert compat_ray.find_missing_names() == [moved]


@pytest.mark.parametrize("name", [*compat._FRONT_NAMES, *compat._MODULES])
def test_every_name_of_vllm_is_there(name: str) -> None:
    assert getattr(compat, name) is not None


@pytest.mark.parametrize(("module", "path"), list(compat.FRONT_ATTRIBUTES.items()))
def test_every_attribute_of_vllm_is_there(module: str, path: str) -> None:
    owner, name = path.split(".")
    assert hasattr(getattr(import_module(module), owner), name)
