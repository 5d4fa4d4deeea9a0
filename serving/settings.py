"""One deployment, read from YAML and checked before anything is started.

This is the only module that reads YAML or the environment. A file holds five
sections: `model` (the pair), `policy` (what is verified), `engine` (vLLM), `replicas`
(Ray Serve and its resources) and `http` (the endpoint).
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from serving.settings_checks import find_disagreements, read_switch
from serving.settings_report import describe

PolicyName = Literal["none", "fixed", "tetris", "dynamic", "goodput"]
"""Every policy an engine can run; `policies.planner` builds the same names."""

DraftMethod = Literal[
    "draft_model", "eagle", "eagle3", "mtp", "dflash", "dspark", "ngram", "suffix"
]

_PROJECT_DIR: Final = Path(__file__).resolve().parent.parent


class SettingsError(ValueError):
    """A deployment file that cannot be served, with one line for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class ModelSettings(_Section):
    """The model pair.

    `target`, `draft` and `tokenizer` are folders when they start with `/`, `./`, `../`
    or `~`, and model-hub ids otherwise. Hub ids pass through untouched; relative
    folders are taken from the folder of the YAML file (from the current directory for
    settings given inline).
    """

    id: Annotated[str, Field(min_length=1, description="the name clients ask for")]
    target: Annotated[
        str, Field(min_length=1, description="the folder or hub id of the target model")
    ]
    draft: Annotated[
        str | None, Field(description="the folder or hub id of the draft model")
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


class PolicySettings(_Section):
    """What is drafted and what is verified.

    `none` starts the engine without a drafter; `fixed` verifies `draft_tokens` of every
    request; `tetris` verifies as many in total, but the best ones of drafts that are
    `extra_draft_tokens` deeper; `dynamic` and `goodput` choose how many from measured
    costs, with drafts of at most `draft_tokens`.
    """

    name: Annotated[PolicyName, Field(description="the verification policy")] = "tetris"
    method: Annotated[DraftMethod, Field(description="the drafting method")] = (
        "draft_model"
    )
    draft_tokens: Annotated[
        int,
        Field(ge=1, le=32, description="draft tokens verified per request and step"),
    ] = 3
    extra_draft_tokens: Annotated[
        int,
        Field(ge=0, le=32, description="draft tokens beyond that to choose from"),
    ] = 2
    latency_target_ms: Annotated[
        float | None,
        Field(gt=0, description="longest time between two steps; goodput keeps to it"),
    ] = None
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
        if self.name == "tetris":
            return self.draft_tokens + self.extra_draft_tokens
        return self.draft_tokens


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
        int | None, Field(ge=1 << 20, description="bytes for the KV cache")
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
    max_ongoing_requests: Annotated[
        int, Field(ge=1, le=100_000, description="requests one replica accepts")
    ] = 64
    max_queued_requests: Annotated[
        int, Field(ge=0, le=1_000_000, description="requests waiting for a replica")
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
    """How many fronts Ray Serve keeps.

    A front that dies takes its clients' connections along, though no engine's work on
    other fronts' requests.
    """

    min: Annotated[int, Field(ge=1, description="fronts kept when idle")] = 1
    max: Annotated[
        int, Field(ge=1, le=64, description="fronts at the highest load")
    ] = 1


class HttpSettings(_Section):
    """The endpoint. `host`, `port` and the two below it are used by `up` only.

    Under `serve run` and `serve deploy` Ray's own configuration owns the addresses.
    """

    host: Annotated[str, Field(description="the address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535, description="the HTTP port")] = 8000
    dashboard_port: Annotated[
        int, Field(ge=1, le=65535, description="the Ray dashboard's port")
    ] = 8265
    metrics_port: Annotated[
        int, Field(ge=1, le=65535, description="the Prometheus metrics port")
    ] = 8080
    max_body_bytes: Annotated[
        int, Field(ge=1024, description="the largest request body accepted, in bytes")
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
    front: Annotated[
        Literal["fleet", "ray"],
        Field(
            description="what answers: fronts that outlive engines, or Ray's ingress"
        ),
    ] = "ray"
    fronts: FrontsSettings = FrontsSettings()
    board: Annotated[
        bool, Field(description="show what the engines do, live, at /board")
    ] = False
    board_text: Annotated[
        bool, Field(description="show the text of draft tokens there; never prompts")
    ] = False


class Settings(_Section):
    """Everything one deployment needs."""

    model: ModelSettings
    policy: PolicySettings = PolicySettings()
    engine: EngineSettings
    replicas: ReplicaSettings = ReplicaSettings()
    http: HttpSettings = HttpSettings()

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        for problem in find_disagreements(self):
            raise ValueError(problem)
        return self


def load_settings(
    path: str | Path, overrides: Mapping[str, Any] | None = None
) -> Settings:
    """Read and check one deployment file.

    Args:
        path: A YAML file. A relative path is taken from the current directory, else
            from the project folder, because Ray runs `serve deploy` builds elsewhere.
        overrides: Values by dotted name (`policy.name`) that replace those in the file.

    Returns:
        The settings, with relative model folders made absolute.

    Raises:
        SettingsError: One line for each fault: file, setting, reason and fix.
    """
    file = _find(Path(path).expanduser())
    try:
        data = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: is not valid YAML: {error}"]) from error
    return parse_settings(data, str(path), file.parent.resolve(), overrides)


def parse_settings(
    data: object,
    source: str = "settings",
    base_dir: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Check settings that are already a mapping.

    Args:
        data: The five sections.
        source: What to call them in messages, usually the file's name.
        base_dir: Folder that relative model folders start from; the current directory
            when None.
        overrides: Values by dotted name that replace those in `data`.

    Returns:
        The settings, with relative model folders made absolute.

    Raises:
        SettingsError: One line for each fault: source, setting, reason and fix.
    """
    if not isinstance(data, dict):
        raise SettingsError(
            [f"{source}: must hold the sections {', '.join(Settings.model_fields)}"]
        )
    merged = _merged(data, overrides or {}, source)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(
            [f"{source}: {problem}" for problem in describe(error, Settings)]
        ) from None
    return _with_absolute_paths(settings, base_dir or Path.cwd())


def parse_value(text: str) -> Any:
    """Read one value as YAML does, e.g. `3`, `true`, `[1, 2]` or a plain word.

    Raises:
        SettingsError: It is not valid YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise SettingsError([f"{text!r} is not a YAML value; quote it"]) from None


def is_local_path(name: str) -> bool:
    """Tell a model folder from a hub id by how it starts (see `ModelSettings`)."""
    return name.startswith(("/", "./", "../", "~")) or name in {".", ".."}


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment variables we act on ourselves; all others pass through."""

    port: int | None
    ray_auth_mode: str | None
    has_hf_token: bool

    @classmethod
    def read(cls) -> Self:
        """Read the process environment.

        Raises:
            SettingsError: PORT is set to something that is no port.
        """
        port = os.environ.get("PORT", "")
        if port and not (port.isdecimal() and 1 <= int(port) <= 65535):
            raise SettingsError([f"PORT: must be a port from 1 to 65535 (got {port})"])
        return cls(
            port=int(port) if port else None,
            ray_auth_mode=os.environ.get("RAY_AUTH_MODE"),
            has_hf_token=bool(os.environ.get("HF_TOKEN")),
        )


class _UniqueKeyLoader(yaml.SafeLoader):
    """Rejects a key given twice, which YAML would settle silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.start_mark
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def _find(path: Path) -> Path:
    for candidate in (path, _PROJECT_DIR / path):
        if candidate.is_file():
            return candidate
    raise SettingsError(
        [f"{path}: no such file; give a deployment file such as configs/demo.yaml"]
    )


def _merged(
    data: Mapping[str, Any], overrides: Mapping[str, Any], source: str
) -> dict[str, Any]:
    merged = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in data.items()
    }
    for name, value in overrides.items():
        section, _, field = name.partition(".")
        if not field or not isinstance(merged.setdefault(section, {}), dict):
            raise SettingsError(
                [f"{source}: {name}: name a setting as section.setting=value"]
            )
        target = merged[section]
        *parents, leaf = field.split(".")
        for parent in parents:
            target[parent] = dict(target.get(parent) or {})
            target = target[parent]
        target[leaf] = value
    return merged


def _with_absolute_paths(settings: Settings, base_dir: Path) -> Settings:
    def resolve(name: str | None) -> str | None:
        if name is None or not is_local_path(name):
            return name
        return str((base_dir / Path(name).expanduser()).resolve())

    model = settings.model.model_copy(
        update={
            field: resolve(getattr(settings.model, field))
            for field in ("target", "draft", "tokenizer")
        }
    )
    return settings.model_copy(update={"model": model})
