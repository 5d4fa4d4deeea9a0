"""The five sections of a deployment file, setting by setting."""

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
)

from serving.settings.access_section import AccessSettings
from serving.settings.gone import allow_front_choice
from serving.settings.policy_section import PolicySettings
from serving.settings.section import Section
from serving.settings.sizes import Bytes


def read_model_name(value: Any) -> Any:
    """Return a hub id without the scheme that some tools write before it."""
    return value.removeprefix("hf://") if isinstance(value, str) else value


def read_switch(value: Any) -> Any:
    """Return the word again where YAML took `on` or `off` for a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class ModelSettings(Section):
    """The model pair.

    `target`, `draft` and `tokenizer` are folders when they start with `/`, `./`, `../`
    or `~`, and model-hub ids otherwise, with or without `hf://` before them; relative
    folders are taken from the folder of the YAML file (from the current directory for
    settings given inline). A path that ends in `.gguf` is a GGUF file, as is
    `package:NAME/FILE.gguf`, one that an installed Python package carries; the first
    start converts it into a folder.
    """

    id: Annotated[str, Field(min_length=1, description="the name clients ask for")]
    target: Annotated[
        str,
        BeforeValidator(read_model_name),
        Field(
            min_length=1, description="the folder, GGUF file or hub id of the target"
        ),
    ]
    draft: Annotated[
        str | None,
        BeforeValidator(read_model_name),
        Field(description="the folder, GGUF file or hub id of the drafter"),
    ] = None
    tokenizer: Annotated[
        str | None,
        BeforeValidator(read_model_name),
        Field(description="a tokenizer other than the target's own"),
    ] = None
    trust_remote_code: Annotated[
        bool, Field(description="whether code shipped with the model may run")
    ] = False


class EngineSettings(Section):
    """vLLM engine arguments; `extra` takes any further one by its vLLM name."""

    device: Annotated[
        Literal["cpu", "gpu"], Field(description="where the engine runs")
    ] = "cpu"
    adapter: Annotated[
        Literal["auto", "on", "off"],
        BeforeValidator(read_switch),
        Field(description="whether our scheduler and worker run in the engine"),
    ] = "auto"
    max_model_len: Annotated[
        int, Field(ge=16, description="prompt and output tokens of one request")
    ]
    max_num_seqs: Annotated[
        int, Field(ge=1, le=4096, description="requests running at the same time")
    ] = 32
    max_num_batched_tokens: Annotated[
        int | None, Field(ge=1, description="tokens in one engine step")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(
            description="the number format of weights and activations; `auto` is that "
            "of the weights, and with `up` float32 on a CPU that has no bfloat16"
        ),
    ] = "auto"
    kv_cache_memory_bytes: Annotated[
        Annotated[Bytes, Field(ge=1 << 20)] | None,
        Field(description="size of the KV cache, e.g. 512Mi"),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None, Field(gt=0, le=1, description="share of the GPU's memory to use")
    ] = None
    tensor_parallel_size: Annotated[
        int, Field(ge=1, le=64, description="devices one replica spans")
    ] = 1
    enforce_eager: Annotated[
        bool, Field(description="whether to skip graph capture and compilation")
    ] = False
    enable_prefix_caching: Annotated[
        bool, Field(description="whether requests share KV blocks of equal prefixes")
    ] = True
    seed: Annotated[int, Field(ge=0, description="the engine's random seed")] = 0
    quantization: Annotated[
        str | None, Field(description="a vLLM quantization method")
    ] = None
    tool_call_parser: Annotated[
        str | None, Field(description="vLLM's tool-call parser for this model")
    ] = None
    reasoning_parser: Annotated[
        str | None, Field(description="vLLM's reasoning parser for this model")
    ] = None
    per_request_metrics: Annotated[
        Literal["none", "summary", "detailed"],
        Field(description="acceptance figures returned with each request"),
    ] = "summary"
    cpu_threads: Annotated[
        int | None,
        Field(ge=1, description="OpenMP threads of one CPU replica"),
    ] = None
    env: Annotated[
        dict[str, str], Field(description="environment variables of the replica")
    ] = {}
    extra: Annotated[
        dict[str, Any], Field(description="more vLLM engine arguments, by vLLM's name")
    ] = {}


class ReplicaSettings(Section):
    """How many engine replicas Ray Serve keeps, and what each may take."""

    min: Annotated[
        int,
        Field(
            ge=0,
            description="replicas kept when idle; with 0 the first request after a "
            "pause waits for one to start",
        ),
    ] = 1
    max: Annotated[int, Field(ge=1, description="replicas at the highest load")] = 1
    target_ongoing_requests: Annotated[
        float, Field(gt=0, description="requests per replica that autoscaling aims at")
    ] = 16
    target_token_ms: Annotated[
        float | None,
        Field(
            gt=0,
            description=(
                "mean time between two tokens of a request that autoscaling keeps, "
                "instead of a number of requests"
            ),
        ),
    ] = None
    max_ongoing_requests: Annotated[
        int, Field(ge=1, le=100_000, description="requests one replica accepts")
    ] = 64
    max_queued_requests: Annotated[
        int,
        Field(
            ge=0,
            le=1_000_000,
            description="requests waiting for a replica; fronts share it",
        ),
    ] = 128
    upscale_delay_s: Annotated[
        float, Field(ge=0, description="seconds of high load before scaling up")
    ] = 10
    downscale_delay_s: Annotated[
        float, Field(ge=0, description="seconds of low load before scaling down")
    ] = 300
    num_cpus: Annotated[
        float, Field(ge=0, description="Ray CPUs reserved by one replica")
    ] = 1
    num_gpus: Annotated[
        float, Field(ge=0, description="GPUs reserved by each tensor-parallel worker")
    ] = 0
    resources: Annotated[
        dict[str, float], Field(description="custom Ray resources of one replica")
    ] = {}
    accelerator_type: Annotated[
        str | None, Field(description="the accelerator type Ray must place on")
    ] = None
    health_check_period_s: Annotated[
        float, Field(gt=0, description="seconds between health checks")
    ] = 2
    health_check_timeout_s: Annotated[
        float, Field(gt=0, description="seconds a health check may take")
    ] = 10
    engine_hang_timeout_s: Annotated[
        float,
        Field(
            gt=0,
            description="seconds without an answer after which an engine counts as "
            "hung and its replica is replaced; more than its longest step takes",
        ),
    ] = 20
    drain_timeout_s: Annotated[
        float, Field(ge=0, description="seconds running requests get to finish")
    ] = 120
    start_timeout_s: Annotated[
        float, Field(gt=0, description="seconds `up` waits for the first replica")
    ] = 600
    start_attempts: Annotated[
        int, Field(ge=1, description="times a failing replica is started again")
    ] = 3


class FrontsSettings(Section):
    """The fronts that Ray Serve keeps.

    A front that dies takes its clients' connections along, though no engine's work on
    other fronts' requests.
    """

    min: Annotated[int, Field(ge=1, description="fronts kept when idle")] = 1
    max: Annotated[
        int, Field(ge=1, le=64, description="fronts at the highest load")
    ] = 1
    label_selector: Annotated[
        dict[str, str],
        Field(description="which nodes may have one, by Ray's labels of nodes"),
    ] = {}


class HttpSettings(Section):
    """The endpoint. `host`, `port` and the two below it are used by `up` only.

    Under `serve run` and `serve deploy` Ray's own configuration owns the addresses.
    """

    model_config = ConfigDict(json_schema_extra=allow_front_choice)

    host: Annotated[str, Field(description="the address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="the HTTP port")] = 8000
    dashboard_port: Annotated[
        int, Field(ge=1, le=65535, description="the Ray dashboard's port")
    ] = 8265
    metrics_port: Annotated[
        int, Field(ge=1, le=65535, description="the Prometheus metrics port")
    ] = 8080
    max_body_bytes: Annotated[
        Bytes,
        Field(ge=1024, description="the largest request body accepted, e.g. 4Mi"),
    ] = 4 << 20
    stream_interval_ms: Annotated[
        float,
        Field(
            ge=0,
            le=1000,
            description="least milliseconds between two chunks of a stream",
        ),
    ] = 20
    keep_alive_timeout_s: Annotated[
        int, Field(ge=1, description="seconds an idle connection is kept")
    ] = 90
    fronts: FrontsSettings = FrontsSettings()
    access: AccessSettings = AccessSettings()
    board: Annotated[
        bool,
        Field(description="show what the engines do, live, at /board, and a chat at /"),
    ] = False
    board_text: Annotated[
        bool | None,
        Field(
            description="show the text of draft tokens there, never prompts; "
            "unset: where `up` listens on a loopback address"
        ),
    ] = None


class Sections(Section):
    """All of them, each fine by itself."""

    model: ModelSettings
    policy: PolicySettings = PolicySettings()
    engine: EngineSettings
    replicas: ReplicaSettings = ReplicaSettings()
    http: HttpSettings = HttpSettings()
