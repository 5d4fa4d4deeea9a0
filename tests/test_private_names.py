"""Private names of vLLM and Ray: in one table per library, and where it says."""

import ast
import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from upstream_names import find_differences, main

from serving import compat_ray
from serving.contract import MovedNamesError, check_names, read_rows
from serving.engine import compat_names, front_names

SERVING = Path(__file__).resolve().parent.parent / "serving"

DOORS = {"engine/compat.py", "engine/compat_cpu.py", "engine/compat_names.py"}
DOORS |= {"engine/front_names.py"}
# What the callers of an engine are meant to catch; vLLM offers it nowhere else.
CALLERS_ERRORS = "vllm.v1.engine.exceptions"

PRIVATE = re.compile(r"(vllm\.v1\b|(vllm|ray)\.(\w+\.)*_).*")

TABLES = (*compat_names.ALL, *front_names.ALL, compat_ray.RAY)

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

# Which class of theirs a class of ours extends, itself or through others.
EXTENDS = {
    "engine/shared/planner_host.py:PlannerHost": ["Scheduler"],
    "engine/cpu/scheduler.py:TetrisScheduler": ["Scheduler"],
    "engine/gpu/scheduler.py:TetrisAsyncScheduler": ["Scheduler", "AsyncScheduler"],
    "engine/cpu/worker.py:TetrisCPUWorker": ["CPUWorker"],
    "engine/cpu/drafter.py:ConfidenceDrafter": ["SpecDecodeBaseProposer"],
    "engine/cpu/runner.py:UninterruptedRunner": [RUNNER_V1],
    "engine/gpu/worker.py:TetrisGPUWorker": ["Worker"],
    "engine/gpu/runner.py:TetrisGPUModelRunner": [RUNNER_V2],
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
    "replica/merged_stats.py:MergedStats": ["StatLoggerBase"],
    "replica/state_logger.py:StateLogger": ["StatLoggerBase"],
    "front/stream_pacing.py:PacedCollector": [
        "vllm.v1.engine.output_processor:RequestOutputCollector"
    ],
    "front/fleet_client.py:FleetClient": ["EngineCoreClient"],
}

# Which variables hold something of theirs: everywhere in the engine adapters, and file
# by file in fronts and replicas, where names are less strict.
HOLDS = {
    "engine/": {
        "Request NewRequestData": "request",
        "Scheduler": "scheduler self._scheduler",
        "RequestQueue": "scheduler.waiting",
        "SchedulerOutput": "scheduler_output output",
        "CachedRequestData": "output.scheduled_cached_reqs",
        "ModelRunnerOutput": "model_runner_output",
        "KVCacheManager": "scheduler.kv_cache_manager",
        "BlockPool": "pool",
        "SpeculativeConfig": "speculative",
        "ParallelConfig": "parallel",
        "CompilationConfig": "compilation",
        "AttentionConfig": "attention",
        "VllmConfig": "vllm_config self.vllm_config",
        "SchedulerConfig": "self.scheduler_config",
        RUNNER_V1: "runner self._runner",
        "vllm.v1.worker.gpu_input_batch:InputBatch": (
            "self.input_batch self._runner.input_batch"
        ),
        "SpecDecodeBaseProposer": "drafter self.drafter self._runner.drafter",
        "DraftModelSpeculator": "speculator",
        "vllm.v1.worker.gpu.input_batch:InputBatch": "input_batch",
        "StepTimingSample": "sample",
    },
    "engine/shared/replay.py": {
        "StructuredOutputGrammar": "grammar",
        "StructuredOutputRequest": "request.structured_output_request",
        "Request": "made",
        "RequestQueue": "self.waiting",
    },
    "front/fleet_client.py": {
        "EngineCoreOutputs": "step",
        "EngineCoreOutput": "output",
    },
    "front/in_flight.py": {
        "EngineCoreRequest": "request",
        "EngineCoreOutput": "output",
        "EngineCoreEvent": "event",
    },
    "front/request_log.py": {"RequestSpecDecodeMetrics": "drafts"},
    "front/vllm_app.py": {
        "AsyncLLM": "llm",
        "OutputProcessor": "processor",
        "RequestState": "state",
    },
    "replica/engine.py": {"AsyncLLM": "self._engine_client", "AsyncMPClient": "core"},
    "replica/slotted_engine.py": {
        "AsyncLLM": "client",
        "AsyncMPClient": "core",
        "BackgroundResources": "core.resources",
    },
    "replica/merged_stats.py": {
        "PrometheusStatLogger": "self._inner",
        "SchedulerStats": "stats",
        "PrefixCacheStats": "prefix",
        "MultiModalCacheStats": "mm_cache_stats",
    },
    "replica/state_logger.py": {
        "SchedulerStats": "scheduler_stats stats",
        "PrefixCacheStats": "prefix",
        "SpecDecodingStats": "drafts",
    },
}

# Of Python, torch and NumPy, under the names above.
OTHERS = {"__dict__", "__init__", "copy_", "append", "items", "values", "keys", "name"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def modules():
    """Return the server's modules by path."""
    return {
        path.relative_to(SERVING).as_posix(): ast.parse(path.read_text("utf-8"))
        for path in sorted(SERVING.rglob("*.py"))
    }


def listed(*classes):
    """Return the names that the tables have of some classes."""
    return {
        name.name
        for table in TABLES
        for where, rows in table.items()
        if where in classes or where.partition(":")[2] in classes
        for name in read_rows(rows)
    }


def attributes(tree, owner):
    """Return the attributes of whatever is written so."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner
    }


def own_names(tree):
    """Return what a module of ours defines itself: methods, and what it sets."""
    nodes = list(ast.walk(tree))
    stored = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return stored | {node.name for node in nodes if isinstance(node, FUNCTIONS)}


@pytest.mark.parametrize(
    ("package", "tables", "whole"),
    [
        ("vllm", (*compat_names.ALL, *front_names.ALL), compat_names.WHOLE),
        ("ray", (compat_ray.RAY,), frozenset()),
    ],
)
def test_all_names_are_where_the_table_says(package, tables, whole):
    # Found without an import, which takes long.
    folder = Path(importlib.util.find_spec(package).origin).parents[1]
    assert not list(find_differences(folder, tables, whole))


def test_a_folder_without_a_library_is_no_proof(tmp_path):
    assert main([str(tmp_path)]) == 2


def test_nobody_else_reaches_for_private_names():
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
            private = [name for name in names if PRIVATE.fullmatch(name)]
            if any(not name.startswith(CALLERS_ERRORS) for name in private):
                found.add(path)
    assert found == {*DOORS, "compat_ray.py"}


@pytest.mark.parametrize("ours", EXTENDS)
def test_what_a_subclass_uses_of_its_base_is_in_the_table(ours):
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


@pytest.mark.parametrize(
    ("where", "variable", "classes"),
    [
        (where, variable, classes)
        for where, held in HOLDS.items()
        for classes, variables in held.items()
        for variable in variables.split()
    ],
)
def test_what_is_used_of_an_object_is_in_the_table(where, variable, classes):
    files = [path for path in modules() if path.startswith(where)]
    used = set().union(*(attributes(modules()[path], variable) for path in files))
    assert used
    known = listed(*classes.split()) | OTHERS
    if where == "engine/" and variable.endswith(("runner", "drafter", "speculator")):
        # They are of our own classes after their adoption.
        for ours in ("cpu/runner.py", "cpu/drafter.py", "gpu/speculators.py"):
            known |= own_names(modules()[where + ours])
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


@pytest.fixture
def write_upstream(tmp_path, monkeypatch):
    """Write a library of the given text, which can be imported."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "upstream").mkdir(exist_ok=True)
        (tmp_path / "upstream" / "core.py").write_text(text)
        return tmp_path

    yield write
    for name in ("upstream", "upstream.core"):
        sys.modules.pop(name, None)


def test_a_library_as_expected_passes_and_what_is_new_asks_for_a_look(write_upstream):
    folder = write_upstream(UPSTREAM)
    check_names("Upstream", "1", WANTED)
    assert not list(find_differences(folder, [WANTED]))
    folder = write_upstream(UPSTREAM.replace("LIMIT = 3", "LIMIT = MORE = 3"))
    differences = list(find_differences(folder, [WANTED], frozenset({"upstream.core"})))
    assert "upstream.core.MORE is new" in differences


@pytest.mark.parametrize(("before", "after", "message"), MOVES)
def test_whatever_moves_is_named_with_what_it_was_for(
    before, after, message, write_upstream
):
    folder = write_upstream(UPSTREAM.replace(before, after))
    with pytest.raises(MovedNamesError, match=f"(?s)Upstream 2 is not.*{message}"):
        check_names("Upstream", "2", WANTED)
    assert re.search(message, "\n".join(find_differences(folder, [WANTED])))
