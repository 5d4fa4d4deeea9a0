"""Write what is made of the settings and the metrics (`make generated`).

The reference of the settings in configs/README.md, and what the Helm chart takes from
elsewhere. Tests tell whether all of it is up to date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import chart
import settings_reference

ROOT = Path(__file__).resolve().parent.parent


def find_outdated() -> Iterator[tuple[Path, str]]:
    """Yield every file that is not as it would be written, and what belongs into it."""
    for file, wanted in (*settings_reference.files(ROOT), *chart.files(ROOT)):
        if not file.is_file() or file.read_text("utf-8") != wanted:
            yield file, wanted


if __name__ == "__main__":
    # As a script it finds what lies in its own folder alone.
    sys.path.insert(0, str(ROOT))
    for file, wanted in find_outdated():
        file.write_text(wanted, "utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
