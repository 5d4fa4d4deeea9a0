"""The five sections of a deployment file, setting by setting."""

import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from serving.draft_lengths import DRAFT_TOKENS, MAX_DRAFT_TOKENS, TETRIS_MARGIN
from serving.settings.gone import allow_front_choice
from serving.settings.names import (
    allow_old_names,
    refuse_two_names,
    spellings_of,
)
from serving.settings.sizes import Bytes

POLICIES: Final = ("none", "fixed", "tetris", "dynamic", "goodput")
"""The policies that come with this package; `policies.registry` builds the same."""

_OWN_POLICY: Final = r"[A-Za-z_][\w.]*:[A-Za-z_]\w*"
"""A planner of somebody's own, as `module:Class`."""


def _check_policy(name: str) -> str:
    if name in POLICIES or re.fullmatch(_OWN_POLICY, name):
        return name
    known = ", ".join(map(repr, POLICIES))
    raise ValueError(
        f"must be one of {known}, or a planner of your own as module:Class "
        f"(got {name!r})"
    )


PolicyName = Annotated[
    str,
    AfterValidator(_check_policy),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(POLICIES)},
                {"pattern": f"^{_OWN_POLICY}$", "description": "`module:Class`"},
            ]
        }
    ),
]

DraftMethod = Literal[
    "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix"
]


def read_switch(value: Any) -> Any:
    """Return the word again where YAML took `on` or `off` for a boolean."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=False,
        alias_generator=AliasGenerator(
            validation_alias=lambda field: AliasChoices(*spellings_of(field))
        ),
    )

    _name_each_once = model_validator(mode="before")(refuse_two_names)


class ModelSettings(_Section):
    """The model pair.

    `target`, `draft` and `tokenizer` are folders when they start with `/`, `./`, `../`
    or `~`, and model-hub ids otherwise. Hub ids pass through untouched; relative
    folders are taken from the folder of the YAML file (from the current directory for
    settings given inline). A path that ends in `.gguf` is a GGUF file, as is
    `package:NAME/FILE.gguf`, one that an installed Python package carries; the first
    start converts it into a folder.
    """

    id: Annotated[str, Field(min_length=1, description="the name clients ask for")]
    target: Annotated[
        str,
        Field(
            min_length=1, description="the folder, GGUF file or hub id of the target"
        ),
    ]
    draft: Annotated[
        str | None, Field(description="the folder, GGUF file or hub id of the drafter")
    ] = None
    tokenizer: Annotated[
        str | None, Field(description="a tokenizer other than the target's own")
    ] = None
    trust_remote_code: Annotated[
        bool, Field(description="whether code shipped with the model may run")
    ] = False


class RequestClassSettings(_Section):
    """Requests that are treated alike.

    A request belongs to the class that `vllm_xargs.request_class` names, else to the
    one with its `priority`, else to the class called `default`, if there is one.
    """

    weight: Annotated[
        float,
        Field(gt=0, le=1000, description="what a token is worth compared with others"),
    ] = 1.0
    latency_target_ms: Annotated[
        float | None,
        Field(
            gt=0, description="longest time per token; drafts are given for it first"
        ),
    ] = None
    priority: Annotated[
        int | None,
        Field(description="vLLM's priority of the class; lower is served earlier"),
    ] = None
    deadline_ms: Annotated[
        float | None,
        Field(
            gt=0,
            description="time for a whole answer, for requests that bring no "
            "deadline_ms; one predicted to take longer is refused with 429",
        ),
    ] = None


class PolicySettings(_Section):
    """What is drafted and what is verified.

    `none` starts the engine without a drafter; `fixed` verifies `draft_tokens` of every
    request; `tetris` verifies as many in total, but the best ones of drafts that are
    `max_draft_tokens` deep; `dynamic` and `goodput` choose how many from measured
    costs, with drafts of at most `max_draft_tokens`. `module:Class` names a planner of
    your own (`policies.planner`); its class is built with `params`.

    Where no name is given it is `none` without a drafter, `fixed` on a GPU (where
    `goodput` has not been measured yet), and `goodput` otherwise.
    """

    model_config = ConfigDict(json_schema_extra=allow_old_names)

    name: Annotated[PolicyName, Field(description="the verification policy")] = (
        "goodput"
    )
    method: Annotated[DraftMethod, Field(description="the drafting method")] = (
        "draft_model"
    )
    draft_tokens: Annotated[
        int,
        Field(
            ge=1,
            le=32,
            description="draft tokens that fixed, and tetris on average, verifies per "
            "request and step",
        ),
    ] = DRAFT_TOKENS
    max_draft_tokens: Annotated[
        int | None,
        Field(
            ge=1,
            le=64,
            description="the longest draft that tetris, dynamic and goodput choose "
            f"from; unset: {MAX_DRAFT_TOKENS}, for tetris {TETRIS_MARGIN} more than "
            "draft_tokens",
        ),
    ] = None
    latency_target_ms: Annotated[
        float | None,
        Field(gt=0, description="longest time between two steps; goodput keeps to it"),
    ] = None
    params: Annotated[
        dict[str, Any],
        Field(description="what a policy of your own (module:Class) is built with"),
    ] = {}
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"],
        Field(description="how the draft model picks its tokens"),
    ] = "greedy"
    classes: Annotated[
        dict[str, RequestClassSettings],
        Field(description="classes of requests by name; goodput weighs by them"),
    ] = {}
    extra: Annotated[
        dict[str, Any], Field(description="more fields of vLLM's speculative_config")
    ] = {}

    @property
    def num_speculative_tokens(self) -> int:
        """Draft depth the engine is started with (0 without speculation)."""
        if self.name == "none":
            return 0
        if self.name == "fixed":
            return self.draft_tokens
        if self.max_draft_tokens is not None:
            return self.max_draft_tokens
        is_constant = self.name == "tetris"
        return self.draft_tokens + TETRIS_MARGIN if is_constant else MAX_DRAFT_TOKENS


class EngineSettings(_Section):
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
        Field(description="the number format of weights and activations"),
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


class ReplicaSettings(_Section):
    """How many engine replicas Ray Serve keeps, and what each may take."""

    min: Annotated[int, Field(ge=1, description="replicas kept when idle")] = 1
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


class FrontsSettings(_Section):
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


class HttpSettings(_Section):
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


class Sections(_Section):
    """All of them, each fine by itself."""

    model: ModelSettings
    policy: PolicySettings = PolicySettings()
    engine: EngineSettings
    replicas: ReplicaSettings = ReplicaSettings()
    http: HttpSettings = HttpSettings()
