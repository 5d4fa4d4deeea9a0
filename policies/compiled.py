"""Compiles the loops that every engine step runs through."""

from __future__ import annotations

import functools
import hashlib
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

if TYPE_CHECKING:
    from collections.abc import Callable

_Function = TypeVar("_Function", bound="Callable[..., object]")


@functools.cache
def _digest_package(package: Path) -> str:
    """Return a digest of the source of everything that may be compiled in."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


_OWN_PACKAGE = Path(__file__).parent


class _PackageIndex(IndexDataCacheFile):  # type: ignore[misc]  # numba is not typed
    """Numba's index of a cache, empty where it cannot be read."""

    def _load_index(self) -> dict[object, object]:
        try:
            index: dict[object, object] = super()._load_index()
        except Exception:
            # It was pickled by other code, with classes that are gone; or it is torn.
            return {}
        return index


class _PackageCache(FunctionCache):  # type: ignore[misc]  # numba is not typed
    """Numba's cache on disk, anew whenever any module of this package changes.

    Numba's own looks at the file that defines a function. The functions and constants
    of other modules are compiled into it all the same, and kept their old values.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)
        # Another package compiles its own modules in, and this one's.
        packages = (_OWN_PACKAGE, Path(function.__code__.co_filename).parent)
        digests = tuple(_digest_package(one) for one in packages)
        stamp = (self._impl.locator.get_source_stamp(), *digests)
        self._cache_file = _PackageIndex(
            self.cache_path, self._impl.filename_base, stamp
        )


def compiled(function: _Function) -> _Function:
    """Compile a function over arrays and numbers when it is first called.

    Between two steps a model's weights push all else out of the caches, and a chain of
    array operations reads its way through much more code than it has numbers: choosing
    the drafts of 16 requests took 570 microseconds after that, and takes 110 in one
    loop. NumPy stays where it runs once in a while.

    What was compiled is kept on disk, beside the source or in the user's cache, for the
    next process; where neither can be written, every process compiles anew.

    Plain loops compile in a fraction of the time that slices and whole arrays take.
    Arguments of another type or memory layout compile again, for seconds: callers pass
    C-contiguous arrays of float64 and int64.
    """
    # Nobody calls them from C, and one wrapper less is a tenth less to compile.
    options = {"error_model": "numpy", "no_cfunc_wrapper": True}
    wrapper: _Function = numba.njit(**options)(function)
    with suppress(RuntimeError):
        wrapper._cache = _PackageCache(function)  # type: ignore[attr-defined]  # numba's
    return wrapper
