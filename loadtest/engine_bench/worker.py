"""An arm's process: one engine that runs the cells it is told to.

Messages are lines of JSON on standard input and output:

    {"do": "start", "llm": {...}, ...}                 -> {"event": "ready"}
    {"do": "run", "prompts": [...], ...}               -> {"event": "switch"} where
                                                          conditions change,
                                                          {"event": "pause"} at the
                                                          end of a turn, then
                                                          {"event": "done", ...}
    {"do": "continue"}                                 -> as after "run"

Whatever vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .lifetime import die_with_parent

if TYPE_CHECKING:
    from .engine import VllmEngine


def main(
    arguments: Sequence[str], make_engine: Callable[..., VllmEngine] | None = None
) -> None:
    """Serve messages until standard input ends.

    Args:
        arguments: The parent's process id.
        make_engine: Takes what the start message says; `VllmEngine` by default.
    """
    die_with_parent(int(arguments[0]))
    with os.fdopen(os.dup(1), "w", buffering=1) as channel:
        os.dup2(2, 1)

        def send(message: dict[str, Any]) -> None:
            channel.write(json.dumps(message) + "\n")

        try:
            _serve(send, make_engine)
        except Exception as error:
            traceback.print_exc()
            send({"event": "error", "message": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None


def _serve(send: Any, make_engine: Callable[..., VllmEngine] | None) -> None:
    engine: VllmEngine | None = None
    messages = map(json.loads, sys.stdin)

    def wait_for_turn() -> None:
        send({"event": "pause"})
        if next(messages, _END)["do"] != "continue":
            raise SystemExit(0)  # The controller has given up.

    for message in messages:
        match message.pop("do"):
            case "start":
                if make_engine is None:
                    from .engine import VllmEngine

                    make_engine = VllmEngine
                engine = make_engine(**message)
                send({"event": "ready"})
            case "run":
                assert engine is not None
                result = engine.run(
                    **message,
                    on_switch=lambda: send({"event": "switch"}),
                    on_pause=wait_for_turn,
                )
                send({"event": "done", "result": result})
    if engine is not None:
        engine.shutdown()


_END = {"do": "end"}

if __name__ == "__main__":
    main(sys.argv[1:])
