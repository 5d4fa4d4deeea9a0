"""One deployment, read from YAML and checked before anything is started.

This is the only module that reads YAML or the environment. A file holds five
sections: `model` (the pair), `policy` (what is verified), `engine` (vLLM), `replicas`
(Ray Serve and its resources) and `http` (the endpoint).
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import yaml
from pydantic import ValidationError, model_validator

from serving.settings.checks import find_disagreements, find_idle_seats
from serving.settings.finding import Finding
from serving.settings.gone import drop_front_choice
from serving.settings.names import means_the_same
from serving.settings.policy_choice import complete_policy
from serving.settings.report import describe
from serving.settings.sections import Sections

_PROJECT_DIR: Final = Path(__file__).resolve().parents[2]


class SettingsError(ValueError):
    """A deployment file that cannot be served, with one line for each fault."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Settings(Sections):
    """Everything one deployment needs."""

    _findings: tuple[Finding, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What there is to tell about how the file was read."""
        return self._findings

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
    except OSError as error:
        raise SettingsError([f"{path}: cannot be read: {error.strerror}"]) from error
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
        findings = drop_front_choice(merged)
    except ValueError as error:
        raise SettingsError([f"{source}: {error}"]) from None
    try:
        findings += complete_policy(merged)
    except ValueError as error:
        raise SettingsError([f"{source}: policy.{error}"]) from None
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(
            [f"{source}: {problem}" for problem in describe(error, Settings)]
        ) from None
    settings._findings = (*findings, *find_idle_seats(settings))
    return _with_absolute_paths(settings, base_dir or Path.cwd())


def dump_settings(settings: Settings) -> str:
    """Write a deployment file that reads as these settings, without their defaults."""
    data = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


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


def read_cache_dir() -> Path:
    """Return the folder for what can be made again: TETRIS_CACHE, or the usual place.

    Returns:
        A path, whether or not there is a folder.
    """
    own = os.environ.get("TETRIS_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser().absolute() / "tetris-serve"


@dataclasses.dataclass(frozen=True)
class RedisForRay:
    """Where a Ray that we start is to keep what its GCS knows.

    Attributes:
        address: `host:port`, with or without `redis://` or `rediss://`.
        username: Empty for Redis's default user.
        password: Empty for none.
    """

    address: str
    username: str
    password: str = dataclasses.field(repr=False)

    @classmethod
    def read(cls) -> Self | None:
        """Read the address, as Ray does, and the login; None without an address."""
        address = os.environ.get("RAY_REDIS_ADDRESS")
        if not address:
            return None
        return cls(
            address,
            os.environ.get("RAY_REDIS_USERNAME", ""),
            os.environ.get("RAY_REDIS_PASSWORD", ""),
        )


@dataclasses.dataclass(frozen=True)
class Environment:
    """The environment variables we act on ourselves; all others pass through."""

    port: int | None
    ray_auth_mode: str | None
    has_hf_token: bool
    redis: RedisForRay | None

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
            redis=RedisForRay.read(),
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
        [f"{path}: no such file; give a deployment file such as configs/tiny.yaml"]
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
        # What replaces a setting may be another of its names.
        for other in [name for name in target if means_the_same(name, leaf)]:
            del target[other]
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
    access = settings.http.access
    if access.keys_file is not None:
        # Links stay: Kubernetes has a Secret's file lead to another one whenever it is
        # replaced, and on each Pod to one of its own.
        keys_file = str(base_dir / Path(access.keys_file).expanduser())
        access = access.model_copy(update={"keys_file": keys_file})
    http = settings.http.model_copy(update={"access": access})
    return settings.model_copy(update={"model": model, "http": http})
