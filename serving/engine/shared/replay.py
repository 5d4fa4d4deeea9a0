"""A request that goes on where another engine stopped.

A front that lost an engine sends the request again, with the token ids that had come
out in `extra_args[EMITTED_TOKEN_IDS]`. They become *output* here, never prompt:
penalties, `min_tokens`, `max_tokens`, bad words, the grammar's position and the
reasoning state depend on the difference. `install` changes, for such requests only:
    `Request.from_engine_core_request`: the ids are output before the request's grammar
        is compiled and before it is scheduled. Figures of the prefill are left out: a
        prefix hit may reach into the output, which vLLM's own check does not expect,
        and the client was told them before.
    `StructuredOutputManager._create_grammar`: the grammar accepts them where it is
        compiled, from where the reasoning ends.
    `Scheduler.add_request`: the request goes to the head of the queue, for somebody is
        waiting in the middle of a sentence.
    `CachedRequestState.__post_init__` (Model Runner V1): the worker knows them before
        logits processors register the request. V2 is sent them by its scheduler. It is
        changed when a worker has been made (`WorkerWrapperBase.init_device`): imported
        sooner, it would miss what vLLM's CPU worker replaces in torch.
and for all requests:
    `Scheduler.update_from_output`: the engine's own statistics go to client 0, which is
        the replica, instead of whichever client comes first.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

INTERNAL_PREFIX: Final = "tetris_"
"""Of every key in `extra_args` that clients may not set."""

EMITTED_TOKEN_IDS: Final = "tetris_emitted_token_ids"

_MARK: Final = "_tetris_original"


def install() -> None:
    """Change vLLM's classes in this process; idempotent."""
    from serving.engine import compat

    request = compat.Request
    if not hasattr(request.from_engine_core_request, _MARK):
        _replace(request, "from_engine_core_request", _from_engine_core_request)
        _replace(compat.Scheduler, "add_request", _add_request)
        _replace(compat.Scheduler, "update_from_output", _update_from_output)
        _replace(compat.StructuredOutputManager, "_create_grammar", _create_grammar)
        _replace(compat.WorkerWrapperBase, "init_device", _init_device)


def emitted_token_ids_of(sampling_params: Any) -> list[int]:
    """Return what a request had put out before it came here; [] for a new one."""
    extra_args = getattr(sampling_params, "extra_args", None) or {}
    return list(extra_args.get(EMITTED_TOKEN_IDS, ()))


def _replace(owner: Any, name: str, build: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    # Wrapped, for whoever asks for its signature or its source: `compat.check` does.
    replacement = functools.wraps(original)(build(original))
    setattr(replacement, _MARK, original)
    bound_to_class = isinstance(owner.__dict__.get(name), classmethod)
    setattr(owner, name, staticmethod(replacement) if bound_to_class else replacement)


def _from_engine_core_request(original: Any) -> Any:
    def from_engine_core_request(request: Any, block_hasher: Any) -> Any:
        made = original(request, block_hasher)
        emitted = emitted_token_ids_of(request.sampling_params)
        if emitted:
            made.append_output_token_ids(emitted)
            made.prefill_stats = None
        return made

    return from_engine_core_request


def _create_grammar(original: Any) -> Any:
    def create_grammar(self: Any, request: Any) -> Any:
        grammar = original(self, request)
        emitted = emitted_token_ids_of(request.sampling_params)
        if not emitted:
            return grammar
        start, _ = self._get_constraint_bounds(
            request, emitted, spec_tokens_committed=True
        )
        if start <= len(emitted):
            request.structured_output_request.reasoning_ended = True
            if not grammar.accept_tokens(request.request_id, emitted[start:]):
                raise ValueError("the grammar refuses what it has allowed before")
        return grammar

    return create_grammar


def _add_request(original: Any) -> Any:
    def add_request(self: Any, request: Any) -> None:
        original(self, request)
        if emitted_token_ids_of(request.sampling_params) and request in self.waiting:
            self.waiting.remove_request(request)
            self.waiting.prepend_request(request)

    return add_request


def _update_from_output(original: Any) -> Any:
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        from serving.engine.compat import EngineCoreOutputs

        outputs = original(self, *args, **kwargs)
        for client, own in list(outputs.items()):
            if client != 0 and own.scheduler_stats is not None:
                replica = outputs.setdefault(0, EngineCoreOutputs())
                replica.scheduler_stats, own.scheduler_stats = own.scheduler_stats, None
        return outputs

    return update_from_output


def _init_device(original: Any) -> Any:
    def init_device(self: Any) -> Any:
        from serving.engine.compat import CachedRequestState

        if not hasattr(CachedRequestState.__post_init__, _MARK):
            _replace(CachedRequestState, "__post_init__", _post_init)
        return original(self)

    return init_device


def _post_init(original: Any) -> Any:
    def post_init(self: Any) -> None:
        original(self)
        emitted = emitted_token_ids_of(self.sampling_params)
        if emitted and not self.output_token_ids:
            self.output_token_ids = emitted

    return post_init
