"""The private names of vLLM that fronts and their replicas lean on, and what for.

As `compat_names`, which lists those of the engine itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from serving.contract import Table

SERVER: Final[Table] = {
    "vllm.v1.engine.core_client:AsyncMPClient": {
        "call_utility_async(method, args)": "how a replica asks the scheduler",
    },
    "vllm.v1.engine.async_llm:AsyncLLM": {
        "errored engine_core model_config": (
            "whether the engine lives, and the way to it"
        ),
        "is_sleeping() do_log_stats()": "whether it answers; figures are summed up",
    },
    "vllm.v1.engine.exceptions": {
        "EngineDeadError": "told apart from refusals",
    },
    "vllm.exceptions": {
        "VLLMClientError": "refusals that are the client's",
    },
    "vllm.v1.executor.uniproc_executor": {
        "UniProcExecutor": "one CPU worker without a process of its own",
    },
    "vllm.tokenizers": {
        "cached_tokenizer_from_config": "text on the board",
    },
}
"""In a replica, around the engine."""

FRONT: Final[Table] = {
    "vllm.tokenizers": {
        "cached_tokenizer_from_config": "what grammars are tried for beforehand",
    },
    "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest": {
        "extract_structured_outputs()": "likewise; completions have it too",
    },
    "vllm.v1.engine.async_llm:AsyncLLM": {
        "engine_core output_processor errored": "below it stands our client",
    },
    "vllm.v1.engine.async_llm": {
        "RequestOutputCollector": "paces streams in its place",
    },
    "vllm.v1.engine.output_processor:RequestOutputCollector": {
        "__init__(output_kind, request_id)": "one is made for each request",
        "put(output) get() get_nowait()": "what comes is handed on in good time",
        "close()": "nobody reads any more",
    },
    "vllm.v1.engine.core_client:EngineCoreClient": {
        "make_async_mp_client": "the one factory of an AsyncLLM's client",
        "add_request_async(request) abort_requests_async(request_ids)": "ours",
        "get_output_async() get_supported_tasks_async() shutdown(...)": "ours",
    },
    "vllm.v1.engine.core_client:BackgroundResources": {
        "engine_dead": "looked at by vLLM's own handlers; never here",
    },
    "vllm.v1.engine.output_processor:OutputProcessor": {
        "abort_requests(request_ids, internal)": (
            "ends a request that no engine can serve, or that is refused"
        ),
        "request_states": "where the error goes: into its queue",
    },
    "vllm.v1.engine.output_processor:RequestState": {
        "queue parent_req": "where the error goes; the others of its `n`",
    },
    "vllm.v1.engine": {
        "EngineCoreRequest": "a request's way to an engine",
        "EngineCoreOutputs FinishReason": "the outputs' way back",
    },
    "vllm.v1.engine:EngineCoreRequest": {
        "request_id sampling_params prompt_token_ids": "changed for a replay",
        "external_req_id": "shared by the prompts of a completion",
        "mm_features prompt_embeds": "tell apart what engines die of",
    },
    "vllm.v1.engine:EngineCoreOutputs": {
        "outputs timestamp scheduler_stats": "taken apart and put into a front's time",
    },
    "vllm.v1.engine:EngineCoreOutput": {
        "request_id new_token_ids finish_reason": "what has come out, whose it is",
        "new_prompt_logprobs_tensors events": "not asked for twice; in a front's time",
        "spec_decode_metrics": "acceptance in a request's line of the log",
    },
    "vllm.v1.metrics.stats:RequestSpecDecodeMetrics": {
        "histogram num_draft_tokens": "the same",
    },
    "vllm.v1.engine:EngineCoreEvent": {
        "timestamp": "put into a front's time",
    },
    "vllm.v1.engine:FinishReason": {
        "ABORT": "nobody here asked for it: the engine is being shut down",
    },
    "vllm.v1.serial_utils": {
        "MsgpackDecoder MsgpackEncoder": "as vLLM packs both",
    },
    "vllm.v1.executor": {
        "Executor": "named to an AsyncLLM, which starts none",
    },
    "vllm.exceptions": {
        "GracefulHTTPError": "a refusal that carries its status",
    },
    "vllm.v1.metrics.ray_wrappers": {
        "RayPrometheusStatLogger": "requests are measured where they are answered",
    },
    "vllm.entrypoints.launchers.api_server.app_state": {
        "init_app_state(engine_client, state, args, supported_tasks)": (
            "vLLM's own request handlers"
        ),
    },
}
"""In a front."""

LEASES: Final[Table] = {
    "vllm.v1.engine.async_llm:AsyncLLM": {
        "logger_manager": "gets a logger that tells fronts the state of every step",
        "vllm_config model_config get_supported_tasks()": "what fronts are told",
    },
    "vllm.v1.engine.core_client:AsyncMPClient": {
        "_send_input(request_type, request, engine)": (
            "hands on a request without putting its own `client_index` into it"
        ),
        "resources": "the engine's processes, whose end is watched",
        "abort_requests_async(request_ids) get_supported_tasks_async()": (
            "fronts' aborts, and a round trip to know that they were heard"
        ),
    },
    "vllm.v1.engine.core_client:BackgroundResources": {
        "engine_manager": "the engine's processes, whose end is watched",
    },
    "vllm.v1.engine": {
        "EngineCoreRequestType": "a request's way to the engine",
    },
    "vllm.v1.engine.core_client": {
        "launch_core_engines": "an engine core is launched with more outputs",
    },
    "vllm.v1.engine.utils:CoreEngineProcManager": {
        "sentinels()": "tell that an engine's process has ended",
    },
    "vllm.v1.engine.core:EngineCoreProc": {
        "ENGINE_CORE_DEAD": "the engine's last word in every output",
    },
    "vllm.utils.network_utils": {
        "get_open_zmq_ipc_path()": "addresses of the outputs",
    },
    "vllm.transformers_utils.config": {
        "maybe_register_config_serialize_by_value()": "configurations can be pickled",
    },
    "vllm.v1.metrics.loggers:StatLoggerBase": {
        "record(scheduler_stats, iteration_stats, ...)": "the state of every step",
        "log_engine_initialized()": "must be there",
    },
    "vllm.v1.metrics.loggers": {
        "PrometheusStatLogger": "is handed the figures of many steps at once",
    },
    "vllm.v1.metrics.loggers:PrometheusStatLogger": {
        "record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)": (
            "the figures"
        ),
        "log() log_engine_initialized()": "handed on",
        "record_sleep_state(...) record_admission_rejection(reason)": "handed on",
    },
    "vllm.config:ModelConfig": {
        "compute_hash()": "which models an engine may share requests with",
    },
    "vllm.v1.metrics.stats:SchedulerStats": {
        "num_running_reqs num_waiting_reqs kv_cache_usage": "what routers go by",
        "prefix_cache_stats spec_decoding_stats": "from which a step's cost is learnt",
        (
            "num_skipped_waiting_reqs num_kv_fetch_reqs_by_stage step_counter "
            "current_wave"
        ): "levels: of several steps the latest counts",
    },
    "vllm.v1.metrics.stats:PrefixCacheStats": {
        "queries hits": "prompt tokens that entered the batch, and those cached",
        (
            "requests preempted_requests preempted_queries preempted_hits"
        ): "summed over steps",
        "reset hits_by_source": "not summed",
    },
    "vllm.v1.metrics.stats:MultiModalCacheStats": {
        "queries": "whether there is anything in it",
    },
    "vllm.v1.spec_decode.metrics:SpecDecodingStats": {
        "num_accepted_tokens": "tokens that a step puts out",
        (
            "num_drafts num_draft_tokens num_accepted_tokens_per_pos "
            "num_draft_tokens_per_pos"
        ): "summed over steps",
        "num_spec_tokens": "positions counted",
    },
}
"""In a replica that works for fronts, besides `SERVER`."""

REPLAY: Final[Table] = {
    "vllm.v1.worker.gpu_input_batch:CachedRequestState": {
        "__post_init__()": "the V1 worker is told what had come out",
        "sampling_params output_token_ids": "from where, and where to",
    },
    "vllm.v1.worker.worker_base:WorkerWrapperBase": {
        "init_device()": "when that class may be imported",
    },
    "vllm.v1.structured_output:StructuredOutputManager": {
        "_create_grammar(request)": "the grammar accepts what had come out",
        "_get_constraint_bounds": "from where the reasoning ends",
    },
    "vllm.v1.structured_output.request:StructuredOutputRequest": {
        "reasoning_ended": "as it had",
    },
    "vllm.v1.structured_output.backend_types:StructuredOutputGrammar": {
        "accept_tokens(request_id, tokens)": "the grammar accepts what had come out",
    },
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "add_request(request)": "a replay goes to the head of the queue",
    },
    "vllm.v1.core.sched.request_queue:RequestQueue": {
        "remove_request(request) prepend_request(request)": "likewise",
    },
    "vllm.v1.request:Request": {
        "from_engine_core_request": "emitted tokens become output",
        "append_output_token_ids": "as they had",
        "prefill_stats": "left out: the client was told before",
    },
}
"""In an engine that goes on where another stopped (`engine.shared.replay`).

Looked for by the contract test alone: a CPU engine must not import the V1 worker's
batch before the worker (`compat_cpu`).
"""

ALL: Final = (SERVER, FRONT, LEASES, REPLAY)
