"""The private names of vLLM that we lean on, and what for: one table, by process.

Each is looked for when the process that needs it starts (`compat.check`) and by one
contract test, so that an upgrade that moves any fails there, naming it, and not in a
step. `serving.contract` says how a row reads.

Before an upgrade, `.ci/upstream_names.py FOLDER` compares the table with an unpacked
wheel without importing it. What vLLM 0.33 asks for is in README.md beside this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from serving.contract import Table

_V2: Final = "vllm.v1.worker.gpu"
_SPEC_DECODE: Final = f"{_V2}.spec_decode"

SCHEDULER: Final[Table] = {
    "vllm.v1.core.sched.scheduler:Scheduler": {
        "schedule(throttle_prefills)": "drafts are trimmed before, depth set after",
        "update_draft_token_ids(draft_token_ids)": (
            "attaches drafts to requests and cuts what a grammar forbids; their "
            "confidences are kept after it"
        ),
        "update_from_output(scheduler_output, model_runner_output)": (
            "outcomes are learnt before stop strings cut them"
        ),
        "_free_request(request, ...)": "what is kept about a request goes with it",
        "has_unfinished_requests()": "an engine about to sleep times no step",
        "get_request_counts()": "whether the same requests go on; telemetry",
        "get_kv_cache_usage()": "telemetry",
        "vllm_config scheduler_config max_model_len num_spec_tokens": "limits",
        "block_size num_lookahead_tokens kv_cache_manager": (
            "KV blocks that drafts and growing requests need"
        ),
        "running waiting requests": "who drafts, decodes and waits",
        "max_num_active_reqs max_num_scheduled_tokens": (
            "set by a batch plan, never above the configuration"
        ),
        "num_waiting_for_streaming_input": "counted among those that run",
    },
    "vllm.v1.request:Request": {
        "request_id sampling_params max_tokens arrival_time": "whose drafts",
        "priority": "its class; raised when it has waited too long",
        "status": "compared by name: WAITING, PREEMPTED, FINISHED_...",
        "num_tokens num_computed_tokens num_prompt_tokens num_output_tokens": (
            "lengths and ends"
        ),
        "num_output_placeholders": "tokens in flight under asynchronous scheduling",
        "is_prefill_chunk is_finished()": "whether it drafts",
        "structured_output_request": "its grammar, which a replay goes on in",
        "spec_token_ids": "its drafts: replaced by shorter lists, never changed",
    },
    "vllm.v1.request:RequestStatus": {
        "WAITING PREEMPTED": "who can start at once",
        "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_REPETITION": (
            "whose output tells how long outputs are"
        ),
    },
    "vllm.v1.core.sched.output:SchedulerOutput": {
        "num_spec_tokens_to_schedule": "the depth drafted after this step",
        "scheduled_spec_decode_tokens num_scheduled_tokens": "what a step verifies",
        "total_num_scheduled_tokens": "what it carries",
        "num_invalid_spec_tokens": "drafts that a grammar cut once drawn",
        "preempted_req_ids": "whose drafts were lost",
        "scheduled_new_reqs scheduled_cached_reqs finished_req_ids": (
            "whose KV cache the drafter lacks"
        ),
        (
            "scheduled_encoder_inputs free_encoder_mm_hashes "
            "scheduled_encoder_input_stats has_structured_output_requests "
            "pending_structured_output_tokens kv_connector_metadata has_sync_kv_loads "
            "aux_output_connector_metadata ec_connector_metadata ec_manager_metadata "
            "new_block_ids_to_zero kv_cache_block_copies kv_connector_block_state "
            "num_common_prefix_blocks make_empty()"
        ): "left alone",
    },
    "vllm.v1.core.sched.output:CachedRequestData": {
        "resumed_req_ids": "whose KV cache the drafter lacks",
    },
    "vllm.v1.core.sched.output:NewRequestData": {
        "req_id": "whose KV cache the drafter lacks",
    },
    "vllm.v1.core.sched.request_queue:RequestQueue": {
        "add_request(request) remove_requests(requests)": "ageing",
    },
    "vllm.v1.core.kv_cache_manager:KVCacheManager": {
        "watermark_blocks": "blocks a batch plan keeps free",
        "block_pool coordinator": "free blocks and who holds which",
        "enable_kv_cache_events get_computed_blocks(request)": (
            "what of a waiting prompt is cached"
        ),
    },
    "vllm.v1.core.block_pool:BlockPool": {
        "get_num_free_blocks() num_gpu_blocks": "memory that is left",
    },
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": {
        "single_type_managers": "drafts are cut to free blocks of one kind only",
    },
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": {
        "block_size req_to_blocks": "blocks that a request holds",
    },
    "vllm.v1.outputs:ModelRunnerOutput": {
        "req_id_to_index sampled_token_ids": "outcomes, before they are cut",
    },
    "vllm.v1.outputs:DraftTokenIds": {
        "req_ids draft_token_ids": "carries confidences and clocks in a subclass",
    },
    "vllm.v1.engine.core:EngineCore": {
        "scheduler": "our utilities are added to this class, and ask it",
    },
    "vllm.v1.engine:EngineCoreOutputs": {
        "outputs": "what steps return",
    },
    "vllm.config:VllmConfig": {
        "additional_config": "carries the policy",
        "speculative_config scheduler_config parallel_config": "limits",
        "model_config": "whether an EAGLE head reads more than text",
    },
    "vllm.config:ModelConfig": {
        "is_multimodal_model": "whether an EAGLE head reads more than text",
    },
    "vllm.config:SpeculativeConfig": {
        "method num_speculative_tokens draft_model_config": "the drafter",
        "num_speculative_tokens_per_batch_size": (
            "without it new requests are padded with drafts nobody selected"
        ),
        "draft_sample_method parallel_drafting uses_draft_model()": (
            "whether drafts are sampled, can end early, can be skipped"
        ),
        "use_local_argmax_reduction use_heterogeneous_vocab": (
            "whether there are logits to read confidence from"
        ),
    },
    "vllm.config:SchedulerConfig": {
        "policy max_num_seqs max_num_batched_tokens async_scheduling": "limits",
        "long_prefill_token_threshold": "whether long prompts let others overtake",
    },
}
"""Under both schedulers."""

GPU_SCHEDULER: Final[Table] = {
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": {
        "_update_after_schedule(scheduler_output)": (
            "sizes the placeholders of the next drafts by the depth set before it"
        ),
    },
    "vllm.config:VllmConfig": {
        "use_v2_model_runner lora_config model_config": "what bars trimming",
        "compilation_config attention_config aux_output_config": "what bars trimming",
    },
    "vllm.config:CompilationConfig": {
        "cudagraph_mode cudagraph_capture_sizes": "sizes to which passes are padded",
    },
    "vllm.config:SpeculativeConfig": {
        "enable_adaptive_verification": "switched on where trimming works",
        "max_num_new_slots_for_drafting": "charged to the step's token limit",
        "attention_backend": "whether it follows lengths the device chose",
        "use_multi_module_mtp()": "whether all its passes are one",
    },
    "vllm.config:ParallelConfig": {
        "pipeline_parallel_size enable_batch_sharded_sampling": "what bars trimming",
    },
    "vllm.config:ModelConfig": {"return_sampling_mask": "what bars trimming"},
    "vllm.config:CUDAGraphMode": {
        "has_full_cudagraphs()": "what bars trimming",
    },
}
"""Under the asynchronous scheduler besides."""

CPU_WORKER: Final[Table] = {
    "vllm.v1.worker.cpu_worker:CPUWorker": {
        "load_model execute_model compile_or_warm_up_model()": (
            "runner and drafter are re-classed after loading, clocks start here"
        ),
        "take_draft_token_ids()": "confidences and clocks travel with the drafts",
        "model_runner": "as vLLM built it, with no factory to override",
    },
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": {
        "execute_model(scheduler_output, intermediate_tensors)": (
            "steps without drafts run as without a drafter"
        ),
        "sample_tokens(grammar_output)": "steps without drafts",
        "_bookkeeping_sync(scheduler_output, ...)": "what the drafter misses",
        "_calc_spec_decode_metadata(num_draft_tokens, cu_num_scheduled_tokens)": (
            "steps without drafts need no rejection sampler"
        ),
        "_sample(logits, spec_decode_metadata)": "steps without drafts",
        "_input_fits_in_drafter(common_attn_metadata)": (
            "one request near the drafter's limit stops no other"
        ),
        (
            "propose_draft_token_ids(scheduler_output, sampled_token_ids, "
            "sampling_metadata, hidden_states, sample_hidden_states, "
            "aux_hidden_states, spec_decode_metadata, common_attn_metadata, ...)"
        ): "skipped, caught up with, watched; metadata is argument 6",
        "_dummy_run(num_tokens, ...)": "start-up profile",
        "drafter attn_groups speculative_config": "hidden where nothing is drafted",
        "input_batch requests": "rows, lengths and grammars of the batch",
        "model model_config vllm_config device": "limits",
        "max_num_reqs max_num_tokens": "sizes",
        "discard_request_mask": "whose prompts go on",
        "execute_model_state kv_cache_config": "states kept for a skipped head",
        "effective_drafter_max_model_len": "the drafter's limit",
    },
    "vllm.v1.worker.gpu_input_batch:InputBatch": {
        "req_ids req_id_to_index num_reqs": "rows",
        "num_computed_tokens_cpu token_ids_cpu block_table": "catching up",
        "generators": "of seeds; set aside while their prompts go on",
    },
    "vllm.v1.worker.block_table:BlockTable": {
        "get_numpy_array()": "blocks to catch up with",
    },
    "vllm.v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer": {
        "propose(num_speculative_tokens, ...)": "a fresh record for each draft",
        "set_inputs_first_pass": "positions stay inside the drafter's tables",
        "_update_positions_dependent_metadata(positions, ...)": (
            "the place between two passes: a draft may end here"
        ),
        "_sample_draft_tokens(hidden_states, sampling_metadata)": "what was drawn",
        "_greedy_sample(hidden_states)": "confidence of argmax drafts",
        "_sample_from_logits(logits, sampling_metadata)": (
            "confidence of sampled drafts; argmax under a grammar"
        ),
        "_enable_probabilistic_draft_probs _last_draft_probs": "drafts that are drawn",
        "_draft_attn_layer_names": "layers left out of a step without drafts",
        "_set_positions(num_tokens, positions)": "catching up",
        "_get_positions(num_tokens)": "catching up",
        "_get_slot_mapping(num_tokens, slot_mapping)": "catching up",
        "build_per_group_and_layer_attn_metadata(common_attn_metadata, ...)": (
            "catching up"
        ),
        "dummy_run(num_tokens, ...)": "start-up profile",
        "model input_ids positions": "catching up",
        "method supports_mm_inputs kv_cache_gid": "which heads can catch up",
        "block_size max_num_tokens max_model_len": "sizes",
        "num_speculative_tokens parallel_drafting uses_mrope": "what it can do",
        "use_local_argmax_reduction use_heterogeneous_vocab": (
            "whether there are logits to read confidence from"
        ),
    },
    "vllm.model_executor.models.interfaces:LocalArgmaxMixin": {
        "get_top_tokens(hidden_states)": "how a head of fewer tokens maps them",
        "logits_processor lm_head": "logits of its own vocabulary",
    },
    "vllm.v1.spec_decode.draft_model:DraftModelProposer": {
        "propose": "drafters that can be skipped: they read no hidden states",
    },
    "vllm.v1.spec_decode.eagle:EagleProposer": {
        "propose": "drafters that can be skipped: what they read is kept",
    },
    "vllm.v1.worker.gpu_model_runner:ExecuteModelState": {
        "scheduler_output hidden_states aux_hidden_states slot_mappings": (
            "the target's states, kept for a head that is skipped"
        ),
    },
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": {
        "draft_token_ids num_draft_tokens cu_num_draft_tokens": "plain steps",
        "cu_num_sampled_tokens target_logits_indices": "plain steps",
        "bonus_logits_indices logits_indices max_spec_len": "plain steps",
    },
    "vllm.v1.attention.backend:CommonAttentionMetadata": {
        "query_start_loc query_start_loc_cpu seq_lens num_reqs": "catching up",
        "num_actual_tokens max_query_len max_seq_len": "catching up",
        "block_table_tensor slot_mapping": "catching up",
        "positions is_prefilling seq_lens_cpu_upper_bound": "catching up",
        "req_idx logits_indices_padded num_logits_indices": "catching up",
    },
    "vllm.v1.sample.metadata:SamplingMetadata": {
        "temperature": "confidence is that of the distribution drawn from",
        "generators": "what replaces rejected drafts is drawn by the request's seed",
    },
    "vllm.v1.sample.rejection_sampler": {
        "_expand apply_top_k_top_p": "two of its CPU kernels are repaired",
        (
            "sample_recovered_tokens(max_spec_len, num_draft_tokens, "
            "cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, "
            "sampling_metadata, device, use_fp64_gumbel)"
        ): "in its place stands what takes a tenth of the time",
    },
    "vllm.v1.sample.ops.topk_topp_sampler": {
        "apply_top_k_top_p(logits, k, p)": "repaired for no rows at all",
    },
    "vllm.triton_utils.dispatcher": {
        "KernelOverride": "how a kernel is put in another's place",
    },
    "vllm.forward_context": {
        (
            "set_forward_context(attn_metadata, vllm_config, num_tokens, ..., "
            "cudagraph_runtime_mode, ..., slot_mapping, ...)"
        ): "catching up",
    },
    "vllm.config:CUDAGraphMode": {
        "NONE": "catching up",
    },
}
"""In a CPU's worker; imported through `compat_cpu`."""

GPU_WORKER: Final[Table] = {
    "vllm.v1.worker.gpu_worker:Worker": {
        "_make_model_runner()": "builds our runner",
        "device vllm_config": "what it is built with",
    },
    f"{_V2}.model_runner:GPUModelRunner": {
        "load_model": "the drafter reports raw confidence from then on",
        "initialize_kv_cache": "where the manager is made, or refused",
        "execute_model(scheduler_output, ...)": "takes the order of a step",
        "postprocess_sampled": "between sampling and drafting: a clock mark",
        "sample_tokens(grammar_output)": "its output carries our report",
        "adaptive_verification speculator rejection_sampler step_timing": (
            "replaced or told"
        ),
        "vllm_config speculative_config num_speculative_steps device": "limits",
    },
    f"{_SPEC_DECODE}.adaptive_verification:AdaptiveVerificationManager": {
        "get_num_tokens(num_tokens_per_req, draft_tokens)": (
            "the budget is the scheduler's"
        ),
        (
            "reallocate_drafts(req_ids, idx_mapping) -> tuple[torch.Tensor, "
            "torch.Tensor, int]"
        ): "ranking is ours",
        "record_confidences(confidence_probs, input_batch)": "rank 0's count",
        "set_initial_cost_curves(samples)": "start-up timings go to the planner",
        "add_request(req_idx)": "clears a slot's confidences",
        "batches_to_profile(capture_sizes)": "without context",
        "compact_batch set_cost_curves": "kept as they are",
        "req_states cost_tables _copy_stream _cudagraph_limit": "taken along",
        "_stale_confidences _copy_events _stale_idx _pending_resets": "taken along",
        "num_bonus_tokens num_speculative_steps query_start_loc": "written by ours",
        "_max_total_logits _batch_budget _confidence_probs": "written by ours",
        "_batch_draft_capacity _num_non_draft_tokens _cu_num_logits": "written by ours",
    },
    f"{_SPEC_DECODE}.acceptance_estimator:OnlineAcceptanceEstimator": {
        "step": "kept from learning",
        "slope intercepts": "1 and 0: confidence is the probability itself",
    },
    f"{_SPEC_DECODE}.speculator:DraftModelSpeculator": {
        "acceptance_estimator": "replaced by the identity",
        "max_num_reqs num_speculative_steps device draft_tokens": "sizes",
    },
    f"{_SPEC_DECODE}.standalone_ar.speculator:StandaloneARSpeculator": {
        "propose(..., num_speculative_tokens)": "made to heed the depth",
        "_multi_step_decode": "after the first pass: a clock mark",
        "num_speculative_steps": "lowered for a draft",
    },
    (f"{_SPEC_DECODE}.target_dependent_ar.speculator:TargetDependentARSpeculator"): {
        "on_multi_step_decode_begin(num_reqs)": "after the first pass: a clock mark",
    },
    f"{_V2}.async_utils:StepTimingCollector": {
        "forward_start()": "called before every forward pass: a clock mark",
    },
    f"{_V2}.async_utils:StepTimingSample": {
        "forward_ms drafter_ms num_target_tokens num_reqs": "start-up timings",
    },
    f"{_V2}.async_utils": {
        "async_copy_to_np(x) stream(to_stream, from_stream)": "copies to the host",
    },
    f"{_V2}.input_batch:InputBatch": {
        "idx_mapping num_reqs": "slots of a batch",
    },
    "vllm.utils.torch_utils": {
        "async_tensor_h2d(data, device, dtype, out)": "copies to the device",
    },
    "vllm.distributed.parallel_state": {
        "get_tp_group()": "rank 0 decides",
    },
    "vllm.v1.outputs:AsyncModelRunnerOutput": {
        "get_output()": "wrapped, to attach our report",
        "@abstract get_output": "all that a subclass must have",
    },
    "vllm.v1.attention.backend:AttentionBackend": {
        "supports_device_cpu_query_lens_mismatch()": "what bars trimming",
    },
    "vllm.config:AttentionConfig": {
        "backend backend_per_kind": "what bars trimming",
    },
}
"""In a GPU's worker."""

UNIPROC_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Runs a CPU engine's only worker in the engine core's process.

By import path, because vLLM turns the name "uni" into "mp" on the CPU: a process of its
own, which the engine core waits for by spinning.
"""

ALL: Final = (SCHEDULER, GPU_SCHEDULER, CPU_WORKER, GPU_WORKER)

WHOLE: Final = frozenset(
    {
        "vllm.v1.core.sched.output:SchedulerOutput",
        f"{_SPEC_DECODE}.adaptive_verification:AdaptiveVerificationManager",
    }
)
"""What a name more means something for: a look at it before an upgrade."""
