"""Engines without Ray and HTTP, configured as a replica's are: for benchmarks.

`start_arguments` needs no vLLM and may be called anywhere. `OfflineEngine` belongs into
a process that was started with the environment it returns.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.adapters import find_adapter_problems
from serving.engine_args import engine_kwargs_of, replica_env_of
from serving.settings.gguf_files import GgufError, find_gguf, is_gguf
from serving.settings.gguf_models import convert
from serving.settings.model import SettingsError, parse_settings

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def start_arguments(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what an engine is started with, and the environment it has to find.

    Args:
        settings: The sections of a deployment file.

    Returns:
        Arguments of `OfflineEngine`, plain values, and environment variables.

    Raises:
        SettingsError: One line for each fault.
    """
    parsed = parse_settings(settings)
    if problems := [*map(str, find_adapter_problems(parsed))]:
        raise SettingsError(problems)
    arguments = engine_kwargs_of(parsed) | {
        "model": parsed.model.target,
        # It takes and returns tokens, and logs nothing.
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if parsed.engine.device == "cpu":
        # As in a replica: a process for the only worker would cost it a core.
        arguments["distributed_executor_backend"] = "uni"
    return arguments, replica_env_of(parsed) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def find_model(name: str, say: Callable[[str], None]) -> Path:
    """Return a model's folder; a GGUF file is converted first, as a server does.

    Args:
        name: A folder, `./x.gguf` or `package:NAME/FILE.gguf`.
        say: Takes lines about the conversion.

    Raises:
        ValueError: It is none of these, or cannot be converted.
    """
    if is_gguf(name):
        try:
            return convert(find_gguf(name), say)
        except GgufError as error:
            raise ValueError(str(error)) from None
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise ValueError(f"{name} is neither a model folder nor a GGUF file")
    return folder


class OfflineEngine:
    """vLLM's engine in this very process, driven step by step."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine.

        Args:
            arguments: As `start_arguments` returns them; those of vLLM's OpenAI front
                end have no use here.
        """
        from vllm import EngineArgs, LLMEngine

        known = {field.name for field in dataclasses.fields(EngineArgs)}
        own = {name: value for name, value in arguments.items() if name in known}
        self._engine = LLMEngine.from_engine_args(EngineArgs(**own))

    def add(
        self,
        req_id: str,
        prompt_token_ids: Sequence[int],
        params: "SamplingParams",
        priority: int = 0,
    ) -> None:
        """Queue a request; the smallest priority goes first, where there are any."""
        prompt = {"prompt_token_ids": list(prompt_token_ids)}
        self._engine.add_request(req_id, prompt, params, priority=priority)

    def step(self) -> "list[RequestOutput]":
        """Run one step, and return what it brought."""
        outputs: list[RequestOutput] = self._engine.step()
        return outputs

    def snapshot(self) -> dict[str, Any] | None:
        """Return the scheduler's cumulative figures; None from vLLM's own."""
        take = getattr(self._scheduler, "snapshot", None)
        return None if take is None else dict(take())

    def wrap_planner(self, wrap: Callable[[Any], Any]) -> bool:
        """Put somebody between engine and planner, as `PlannerHost.wrap_planner` does.

        Returns:
            False if the engine has no planner, because vLLM's own scheduler runs.
        """
        do_wrap = getattr(self._scheduler, "wrap_planner", None)
        if do_wrap is not None:
            do_wrap(wrap)
        return do_wrap is not None

    def shutdown(self) -> None:
        """Stop the engine."""
        self._engine.engine_core.shutdown()

    @property
    def _scheduler(self) -> Any:
        core: Any = self._engine.engine_core
        return core.engine_core.scheduler
