"""An arm's process: one engine that runs the requests it is told to.

Messages are lines of JSON on standard input and output:

    {"do": "start", "arguments": {...}, ...}   -> {"event": "ready"}
    {"do": "run", "prompts": [...], ...}       -> {"event": "switch"} where conditions
                                                  change, then {"event": "done", ...}

Whatever vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any

from .lifetime import die_with_parent

if TYPE_CHECKING:
    from .arm_engine import ArmEngine


def main(parent_pid: int) -> None:
    """Serve messages until standard input ends."""
    die_with_parent(parent_pid)
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)

        def send(message: dict[str, Any]) -> None:
            channel.write(json.dumps(message) + "\n")

        try:
            _serve(send)
        except Exception as error:
            traceback.print_exc()
            send({"event": "error", "message": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None


def _serve(send: Any) -> None:
    engine: ArmEngine | None = None
    for message in map(json.loads, sys.stdin):
        if message.pop("do") == "start":
            # vLLM reads its environment and takes seconds: not before it is needed.
            from .arm_engine import ArmEngine

            engine = ArmEngine(**message)
            send({"event": "ready"})
        else:
            assert engine is not None
            result = engine.run(**message, on_switch=lambda: send({"event": "switch"}))
            send({"event": "done", "result": result})
    if engine is not None:
        engine.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
