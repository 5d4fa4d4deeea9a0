"""What a run leaves, line by line: outcomes of requests, samples of the client."""

import gzip
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .health import ClientSample
from .outcome import Outcome


@dataclass
class Records:
    """One run: outcomes in the order of their ends, and the client's own samples."""

    epoch_s: float | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    client: list[ClientSample] = field(default_factory=list)
    num_processes: int | None = None


def to_entry(item: Outcome | ClientSample) -> dict[str, Any]:
    """Return what a line is to hold; seconds are rounded to a microsecond."""
    kind = "request" if isinstance(item, Outcome) else "client"
    return {kind: {name: _shorten(value) for name, value in asdict(item).items()}}


def _shorten(value: Any) -> Any:
    if isinstance(value, list):
        return [round(gap_ms, 3) for gap_ms in value]
    return round(value, 6) if isinstance(value, float) else value


def read_records(path: Path) -> Records:
    """Read a file of records, compressed or not; a line that was cut short is none."""
    records = Records()
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for line in file:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if "request" in entry:
                records.outcomes.append(Outcome(**entry["request"]))
            elif "client" in entry:
                records.client.append(ClientSample(**entry["client"]))
            else:
                records.epoch_s = entry["run"]["epoch_s"]
                records.num_processes = entry["run"].get("num_processes")
    return records


def compress(path: Path) -> Path:
    """Compress a file of records and remove the original; return the new file."""
    compressed = path.with_name(f"{path.name}.gz")
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return compressed
