"""Watch a fleet: `python -m loadtest.cluster --output DIR`."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from loadtest.environment import describe_run
from loadtest.errors import LoadTestError
from loadtest.interrupts import interruptible
from loadtest.result_folder import ResultFolder

from .parts import PARTS, Stage
from .show import draw, render

_say = partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the parts that were asked for; what the folder holds of others stays."""
    options = _parse(arguments)
    folder = ResultFolder(options.output)
    results = folder.read_json("results.json") or {}
    stage = Stage(options.output, options.config, options.scale, _say)
    for name in options.parts:
        place = describe_run() | {"config": options.config, "scale": options.scale}
        try:
            with interruptible():
                results[name] = place | PARTS[name](stage)
        except LoadTestError as error:
            _say(f"error: {name}: {error}")
            return 2
        except KeyboardInterrupt:
            _say(f"stopped; of {name} nothing is kept")
            return 130
        folder.write_json("results.json", results)
        hidden = {*place, "timeline"}
        shown = {k: v for k, v in results[name].items() if k not in hidden}
        _say(f"{name}: {json.dumps(shown)}")
    results = folder.read_json("results.json") or {}
    folder.write("results.md", render(results))
    draw(results, options.output / "results.png")
    _say(f"results are in {options.output}")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    texts = "; ".join(f"{name}: {(one.__doc__ or '')}" for name, one in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.cluster",
        description="Starts fleets of its own and watches them while clients ask. "
        + texts,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="for results.json")
    add("--config", default="configs/tiny.yaml", help="deployment file")
    add("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="of the show")
    add("--scale", type=float, default=1.0, help="of durations; .1: does it run?")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
