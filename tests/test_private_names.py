"""Private names of vLLM and Ray: in one table per library, and where it says."""

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from serving import compat_ray
from serving.contract import MovedNamesError, check_names, read_rows
from serving.engine import compat_names, front_names

ROOT = Path(__file__).resolve().parent.parent

DOORS = {"engine/compat.py", "engine/compat_cpu.py", "engine/compat_names.py"}
DOORS |= {"engine/front_names.py"}
# What the callers of an engine are meant to catch; vLLM offers it nowhere else.
CALLERS_ERRORS = "vllm.v1.engine.exceptions"

PRIVATE = re.compile(r"(vllm\.v1\b|(vllm|ray)\.(\w+\.)*_).*")

TABLES = (*compat_names.ALL, *front_names.ALL, compat_ray.RAY)

# Which class of theirs a class of ours extends, itself or through others.
EXTENDS = {
    "engine/shared/planner_host.py:PlannerHost": ["Scheduler"],
    "engine/cpu/scheduler.py:TetrisScheduler": ["Scheduler"],
    "engine/gpu/scheduler.py:TetrisAsyncScheduler": ["Scheduler", "AsyncScheduler"],
    "engine/cpu/worker.py:TetrisCPUWorker": ["CPUWorker"],
    "engine/cpu/drafter.py:ConfidenceDrafter": ["SpecDecodeBaseProposer"],
    "engine/cpu/runner.py:UninterruptedRunner": [
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    ],
    "engine/gpu/worker.py:TetrisGPUWorker": ["Worker"],
    "engine/gpu/runner.py:TetrisGPUModelRunner": [
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    ],
    "engine/gpu/runner.py:ReportedOutput": ["AsyncModelRunnerOutput"],
    "engine/gpu/clock.py:LiveStepTiming": ["StepTimingCollector"],
    "engine/gpu/verification.py:PlannedVerification": ["AdaptiveVerificationManager"],
    "engine/gpu/speculators.py:RawConfidence": ["OnlineAcceptanceEstimator"],
    "engine/gpu/speculators.py:PacedStandalone": [
        "StandaloneARSpeculator",
        "DraftModelSpeculator",
    ],
    "engine/gpu/speculators.py:PacedTargetDependent": ["TargetDependentARSpeculator"],
    "replica/engine.py:TetrisEngine": ["VLLMEngine"],
    "replica/server.py:EngineServer": ["LLMServer"],
    "replica/local_models.py:SkipLocalDownload": ["CallbackBase"],
    "replica/slotted_engine.py:SlottedEngine": ["VLLMEngine"],
    "replica/state_logger.py:StateLogger": ["StatLoggerBase"],
    "front/stream_pacing.py:PacedCollector": [
        "vllm.v1.engine.output_processor:RequestOutputCollector"
    ],
    "front/fleet_client.py:FleetClient": ["EngineCoreClient"],
}

# What variables hold: everywhere in the engine adapters, and file by file in fronts and
# replicas, where names are less strict.
IN_ADAPTERS = {
    "request": ["Request", "NewRequestData"],
    "scheduler": ["Scheduler"],
    "self._scheduler": ["Scheduler"],
    "scheduler.waiting": ["RequestQueue"],
    "scheduler_output": ["SchedulerOutput"],
    "output": ["SchedulerOutput"],
    "output.scheduled_cached_reqs": ["CachedRequestData"],
    "model_runner_output": ["ModelRunnerOutput"],
    "scheduler.kv_cache_manager": ["KVCacheManager"],
    "pool": ["BlockPool"],
    "speculative": ["SpeculativeConfig"],
    "parallel": ["ParallelConfig"],
    "compilation": ["CompilationConfig"],
    "attention": ["AttentionConfig"],
    "vllm_config": ["VllmConfig"],
    "self.vllm_config": ["VllmConfig"],
    "self.scheduler_config": ["SchedulerConfig"],
    "runner": ["vllm.v1.worker.gpu_model_runner:GPUModelRunner"],
    "self._runner": ["vllm.v1.worker.gpu_model_runner:GPUModelRunner"],
    "self.input_batch": ["vllm.v1.worker.gpu_input_batch:InputBatch"],
    "self._runner.input_batch": ["vllm.v1.worker.gpu_input_batch:InputBatch"],
    "drafter": ["SpecDecodeBaseProposer"],
    "self.drafter": ["SpecDecodeBaseProposer"],
    "self._runner.drafter": ["SpecDecodeBaseProposer"],
    "speculator": ["DraftModelSpeculator"],
    "input_batch": ["vllm.v1.worker.gpu.input_batch:InputBatch"],
    "sample": ["StepTimingSample"],
}

HOLDS = {("engine/", name): classes for name, classes in IN_ADAPTERS.items()} | {
    ("front/fleet_client.py", "step"): ["EngineCoreOutputs"],
    ("front/fleet_client.py", "output"): ["EngineCoreOutput"],
    ("front/fleet_client.py", "event"): ["EngineCoreEvent"],
    ("front/in_flight.py", "request"): ["EngineCoreRequest"],
    ("front/request_log.py", "drafts"): ["RequestSpecDecodeMetrics"],
    ("front/vllm_app.py", "llm"): ["AsyncLLM"],
    ("front/vllm_app.py", "processor"): ["OutputProcessor"],
    ("front/vllm_app.py", "state"): ["RequestState"],
    ("replica/engine.py", "self._engine_client"): ["AsyncLLM"],
    ("replica/engine.py", "core"): ["AsyncMPClient"],
    ("replica/slotted_engine.py", "client"): ["AsyncLLM"],
    ("replica/slotted_engine.py", "core"): ["AsyncMPClient"],
    ("replica/slotted_engine.py", "core.resources"): ["BackgroundResources"],
    ("replica/state_logger.py", "scheduler_stats"): ["SchedulerStats"],
    ("replica/state_logger.py", "stats"): ["SchedulerStats"],
    ("replica/state_logger.py", "prefix"): ["PrefixCacheStats"],
    ("replica/state_logger.py", "drafts"): ["SpecDecodingStats"],
    ("engine/shared/replay.py", "grammar"): ["StructuredOutputGrammar"],
    ("engine/shared/replay.py", "request.structured_output_request"): [
        "StructuredOutputRequest"
    ],
    ("engine/shared/replay.py", "made"): ["Request"],
    ("engine/shared/replay.py", "self.waiting"): ["RequestQueue"],
}

# Of Python, torch and NumPy, under the names above.
OTHERS = {"__dict__", "__init__", "copy_", "append", "items", "values", "keys", "name"}


@pytest.fixture(scope="module")
def tool() -> Any:
    """The script that compares trees, as a module."""
    path = ROOT / ".ci" / "upstream_names.py"
    spec = importlib.util.spec_from_file_location("upstream_names", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is executed.
    sys.modules["upstream_names"] = module
    spec.loader.exec_module(module)
    return module


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Return the server's modules by path."""
    folder = ROOT / "serving"
    return {
        path.relative_to(folder).as_posix(): parse(path)
        for path in sorted(folder.rglob("*.py"))
    }


def find_folder(package: str) -> Path:
    """Return the folder that holds an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.parent


def listed(*classes: str) -> set[str]:
    """Return the names that the tables have of some classes."""
    return {
        name.name
        for table in TABLES
        for where, rows in table.items()
        if where in classes or where.partition(":")[2] in classes
        for name in read_rows(rows)
    }


def attributes(tree: ast.AST, owner: str) -> set[str]:
    """Return the attributes of whatever is written so."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner
    }


def own_names(tree: ast.AST) -> set[str]:
    """Return what a module of ours defines itself: methods, and what it sets."""
    return {
        node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else name
        for node in ast.walk(tree)
        for name in [getattr(node, "attr", "")]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    }


@pytest.mark.parametrize(
    ("package", "tables", "whole"),
    [
        ("vllm", (*compat_names.ALL, *front_names.ALL), compat_names.WHOLE),
        ("ray", (compat_ray.RAY,), frozenset()),
    ],
)
def test_all_names_are_where_the_table_says(
    package: str, tables: Any, whole: Any, tool: Any
) -> None:
    assert not list(tool.find_differences(find_folder(package), tables, whole))


def test_nobody_else_reaches_for_private_names() -> None:
    found = set()
    for path, tree in modules().items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            found |= {
                (path, name)
                for name in names
                if PRIVATE.fullmatch(name) and not name.startswith(CALLERS_ERRORS)
            }
    assert {path for path, _ in found} == {*DOORS, "compat_ray.py"}


@pytest.mark.parametrize("ours", EXTENDS)
def test_what_a_subclass_uses_of_its_base_is_in_the_table(ours: str) -> None:
    path, _, name = ours.partition(":")
    trees = modules()
    [cls] = [
        node
        for node in ast.walk(trees[path])
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    own = own_names(trees[path])
    if "Scheduler" in EXTENDS[ours]:
        own |= own_names(trees["engine/shared/planner_host.py"])
        own |= {"_forget", "running", "waiting"} & listed("Scheduler") | {"_spec"}
    used = attributes(cls, "self") - own | attributes(cls, "super()")
    # A scheduler of ours calls these of another class of ours.
    of_ours = {"snapshot", "_forget", "change_policy"} if "Scheduler" in name else set()
    assert used - OTHERS - of_ours <= listed(*EXTENDS[ours])


@pytest.mark.parametrize(("where", "variable"), HOLDS)
def test_what_is_used_of_an_object_is_in_the_table(where: str, variable: str) -> None:
    trees = modules()
    used = {
        name
        for path, tree in trees.items()
        if path.startswith(where)
        for name in attributes(tree, variable)
    }
    assert used
    known = listed(*HOLDS[where, variable]) | OTHERS
    if where == "engine/" and variable.endswith(("runner", "drafter", "speculator")):
        # They are of our own classes after their adoption.
        for ours in ("cpu/runner.py", "cpu/drafter.py", "gpu/speculators.py"):
            known |= own_names(trees[where + ours])
    assert used <= known


UPSTREAM = """
from abc import ABC, abstractmethod

LIMIT = 3


class Base(ABC):
    def inherited(self, first):
        self.set_here = first


class Engine(Base):
    field: int

    @abstractmethod
    def run(self, step, *, depth=0) -> tuple[int, str]:
        pass


def helper(a, b):
    pass
"""

WANTED = {
    "upstream.core:Engine": {
        "field set_here inherited(first)": "state",
        "run(step, ...) -> tuple[int, str]": "a step",
        "@abstract run": "ours has it",
    },
    "upstream.core": {"LIMIT helper(a, b)": "help"},
}

MOVES = [
    ("class Engine(Base)", "class Machine(Base)", "Engine is gone"),
    ("    field: int\n", "", "Engine.field is gone: state"),
    ("self.set_here", "self.elsewhere", "Engine.set_here is gone: state"),
    ("inherited(self, first)", "inherited(self)", r"takes \(\), not \(first\): state"),
    ("def run(self, step,", "def run(self, tick,", r"takes \(tick, depth\)"),
    ("tuple[int, str]", "int", r"returns .*int.*, not tuple\[int, str\]: a step"),
    ("    @abstractmethod\n", "", r"wants \[\] of its subclasses"),
    ("LIMIT = 3", "", "LIMIT is gone: help"),
    ("def helper(a, b)", "def helper(a, b, c)", r"takes \(a, b, c\), not \(a, b\)"),
]


def write_upstream(folder: Path, text: str) -> Path:
    package = folder / "upstream"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core.py").write_text(text)
    return folder


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a library of the given text, to be imported once."""
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda text: write_upstream(tmp_path, text)
    for name in ("upstream", "upstream.core"):
        sys.modules.pop(name, None)


def test_a_library_as_expected_passes(importable: Any, tool: Any) -> None:
    folder = importable(UPSTREAM)
    check_names("Upstream", "1", WANTED)
    assert not list(tool.find_differences(folder, [WANTED]))


@pytest.mark.parametrize(("before", "after", "message"), MOVES)
def test_whatever_moves_is_named_with_what_it_was_for(
    before: str, after: str, message: str, importable: Any, tool: Any
) -> None:
    folder = importable(UPSTREAM.replace(before, after))
    with pytest.raises(MovedNamesError, match=f"(?s)Upstream 2 is not.*{message}"):
        check_names("Upstream", "2", WANTED)
    assert re.search(message, "\n".join(tool.find_differences(folder, [WANTED])))


def test_a_new_name_asks_for_a_look_before_an_upgrade(
    tmp_path: Path, tool: Any
) -> None:
    folder = write_upstream(tmp_path, UPSTREAM.replace("LIMIT = 3", "LIMIT = MORE = 3"))
    whole = frozenset({"upstream.core"})
    differences = list(tool.find_differences(folder, [WANTED], whole))
    assert "upstream.core.MORE is new" in differences
