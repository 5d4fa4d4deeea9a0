"""`tetris-serve doctor --bundle FILE`: what somebody else needs to find a fault.

Versions, the settings without their secrets, what the running server says of itself and
the ends of its logs, as one archive.
"""

import http.client
import importlib.metadata
import io
import json
import os
import platform
import re
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from serving.commands.console import Console
from serving.commands.doctor import examine
from serving.commands.own_machine import base_url_of
from serving.local.logs import changed_at, find_logs
from serving.settings.finding import Finding
from serving.settings.key_file import KEY_PREFIX
from serving.settings.model import Settings

HIDDEN: Final = "(left out)"

_SECRET = re.compile(
    r"token(?!s|iz)|secret|password|passwd|api_?key|authorization", re.I
)
"""Names whose values are left out; `draft_tokens` and `tokenizer` are none of them."""

_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_IN_TEXT = re.compile(
    rf"\b((hf_|sk-|Bearer\s+)[\w.-]{{8,}}|{re.escape(KEY_PREFIX)}[\w-]{{40,}})"
)
"""Tokens of others, and keys of ours, which are longer than any name."""
_VARIABLES: Final = re.compile(r"(RAY|VLLM|TETRIS|OMP|NUMBA|CUDA|HF)_|PORT$")
_LOGS: Final = (
    "serve/*.log",
    "events/*.log",
    "worker-*.err",
    "gcs_server.*",
    "raylet.*",
)
_LOG_BYTES: Final = 128 << 10
"""Of the end of each log."""

_MAX_LOGS: Final = 60
_TIMEOUT_S: Final = 5.0


def bundle(settings: Settings, file: Path) -> int:
    """Write the archive.

    Args:
        settings: The deployment, whose server may run or not.
        file: `.tar.gz`, made or replaced.

    Returns:
        The exit code: 1 if the file cannot be written.
    """
    console = Console()
    parts: dict[str, str] = {}
    for name, text in _collect(settings):
        console.say(f"  {name}")
        parts[name] = hide(text)
    try:
        with tarfile.open(file, "w:gz") as archive:
            for name, text in parts.items():
                content = text.encode()
                entry = tarfile.TarInfo(f"tetris-serve/{name}")
                entry.size = len(content)
                entry.mtime = int(time.time())  # noqa: TID251 - a date
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        console.say(f"--bundle {file}: {error.strerror}; name a file in another folder")
        return 1
    console.say(
        f"{file} holds {len(parts)} parts. What was recognised as a key or token is "
        "left out; look at it before you hand it on."
    )
    return 0


def _collect(settings: Settings) -> Iterator[tuple[str, str]]:
    yield "findings.txt", "\n".join(map(_line, examine(settings)))
    yield "versions.json", json.dumps(_versions(), indent=1)
    plain = without_secrets(settings.model_dump(mode="json"))
    yield "settings.yaml", yaml.safe_dump(plain, sort_keys=False)
    yield "health.json", _ask(f"{base_url_of(settings)}/health")
    metrics = _ask(f"http://127.0.0.1:{settings.http.metrics_port}/metrics")
    # `up` moves on where somebody else has the port.
    is_rays = re.search(r"^ray_|: no answer", metrics, re.MULTILINE)
    yield "metrics.txt", metrics if is_rays else "another program's, left out\n"
    folder = find_logs()
    logs = [path for pattern in _LOGS for path in folder.glob(pattern)]
    # The latest first, where there are more than anybody reads.
    logs.sort(key=changed_at, reverse=True)
    for path in logs[:_MAX_LOGS]:
        yield f"logs/{path.relative_to(folder)}", _end_of(path)


def _line(finding: Finding) -> str:
    return f"{finding.severity:<8} {finding}"


def _versions() -> dict[str, Any]:
    packages = {
        name: one.version
        for one in importlib.metadata.distributions()
        if (name := one.metadata["Name"])
    }
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "environment": without_secrets(
            {k: v for k, v in sorted(os.environ.items()) if _VARIABLES.match(k)}
        ),
        "packages": dict(sorted(packages.items())),
    }


def without_secrets(value: Any, name: str = "") -> Any:
    """Return plain values with those left out whose names say that they are secret."""
    if isinstance(value, dict):
        return {key: without_secrets(one, str(key)) for key, one in value.items()}
    if isinstance(value, list):
        return [without_secrets(one, name) for one in value]
    return HIDDEN if value and _SECRET.search(name) else value


def hide(text: str) -> str:
    """Leave out what looks like a credential, in URLs and in running text."""
    return _IN_TEXT.sub(HIDDEN, _IN_URL.sub(HIDDEN, text))


def _ask(url: str) -> str:
    # To this machine, whatever proxy is set for others.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_S) as response:
            return str(response.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        return f"{url}: {error.code}\n{error.read().decode(errors='replace')}"
    except (OSError, http.client.HTTPException) as error:
        return f"{url}: no answer ({error})"


def _end_of(path: Path) -> str:
    try:
        with path.open("rb") as content:
            size = content.seek(0, os.SEEK_END)
            content.seek(max(0, size - _LOG_BYTES))
            return content.read().decode(errors="replace")
    except OSError as error:
        return f"cannot be read: {error}"
