"""Checks of machine and model pair, on folders made up for the purpose."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from serving.cli import main
from serving.commands.doctor import check_room, doctor, examine
from serving.local import ports
from serving.settings.finding import Finding
from serving.settings.model import Settings, parse_settings
from serving.settings.model_files import weigh_model
from serving.settings.model_pair import check_models
from serving.settings.number_format import lacks_bfloat16, with_fast_format
from tests.serving.test_settings import minimal


def write_model(
    folder: Path, *, vocab: dict[str, int] | None = None, **config: Any
) -> str:
    folder.mkdir(exist_ok=True)
    config = {"vocab_size": 4, "max_position_embeddings": 2048} | config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    tokenizer = {"model": {"type": "BPE", "vocab": vocab or {"a": 0, "b": 1}}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def pair(target: str, draft: str, **sections: dict[str, Any]) -> Settings:
    model = {"target": target, "draft": draft}
    return parse_settings(minimal(model=model, **sections))


def errors(findings: list[Finding]) -> list[str]:
    return [str(finding) for finding in findings if finding.severity == "error"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    return write_model(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> str:
    return write_model(tmp_path / "draft")


@pytest.mark.parametrize(
    ("flags", "is_slow"),
    [("fma avx2 avx512f", True), ("fma avx512f avx512_bf16", False), (None, False)],
)
def test_a_cpu_that_is_known_to_convert_bfloat16_is_told_of_float32(
    flags, is_slow, draft, tmp_path, monkeypatch
):
    cpu_info = tmp_path / "cpuinfo"
    if flags is not None:
        cpu_info.write_text(f"model name\t: made up\nflags\t\t: {flags}\n")
    monkeypatch.setattr(
        "serving.settings.model_pair.lacks_bfloat16", lambda: lacks_bfloat16(cpu_info)
    )
    target = write_model(tmp_path / "target", dtype="bfloat16")

    def warnings(**engine: str) -> list[str]:
        findings = check_models(pair(target, draft, engine={"device": "cpu"} | engine))
        return [f.setting for f in findings if f.severity == "warning"]

    assert warnings() == (["engine.dtype"] if is_slow else [])
    assert warnings(dtype="float32") == []


# Of one token and layer: 1 head x 8 x keys and values x 2 bytes, of both models.
LAYER = {"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
LENGTH = 1 << 14
CACHE = 2 * 32 * LENGTH


@pytest.mark.parametrize(
    ("config", "engine", "expected"),
    [
        ({}, {}, "float32"),
        ({}, {"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, {}, "auto"),
        # A request of full length has no room any more, or nobody can tell.
        ({}, {"kv_cache_memory_bytes": 2 * CACHE, "max_model_len": LENGTH}, "float32"),
        ({}, {"kv_cache_memory_bytes": CACHE, "max_model_len": LENGTH}, "auto"),
        ({"head_dim": 0, "hidden_size": 0}, {"kv_cache_memory_bytes": CACHE}, "auto"),
        ({"size": 2 << 40}, {}, "auto"),
        ({"size": 0}, {}, "auto"),
    ],
)
def test_float32_is_taken_where_it_is_faster_and_fits(
    config, engine, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr("serving.settings.number_format.lacks_bfloat16", lambda: True)
    config = LAYER | {"dtype": "bfloat16"} | config
    size = config.pop("size", 1024)
    names = [write_model(tmp_path / name, **config) for name in ("target", "draft")]
    for name in names:
        # Without what it would take on a disk.
        with (Path(name) / "model.safetensors").open("wb") as weights:
            weights.truncate(size)
    told: list[Finding] = []
    settings = pair(*names, engine={"device": "cpu"} | engine)
    chosen = with_fast_format(settings, told.append)
    assert chosen.engine.dtype == expected
    assert [one.setting for one in told] == ["engine.dtype"] * (chosen is not settings)
    taken = 2 * size if chosen is not settings else size
    assert weigh_model(names[0], chosen.engine.dtype) == taken


def test_a_model_that_cannot_be_read_keeps_its_format(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.settings.number_format.lacks_bfloat16", lambda: True)
    for target in (str(tmp_path / "none"), "an/id-that-is-not-here"):
        settings = pair(target, target, engine={"device": "cpu"})
        assert with_fast_format(settings, pytest.fail) is settings


SHORT = {"max_position_embeddings": 512}
ON_CPU = {"engine": {"device": "cpu"}}
ON_GPU = {"engine": {"device": "gpu"}, "replicas": {"num_gpus": 1}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("changed", "config", "chosen", "problem"),
    [
        ("draft", {"vocab_size": 9}, {}, "error: .* 9 tokens, the target's has 4"),
        ("draft", {"vocab": {"a": 1, "b": 0}}, {}, "error: .*assigns other token ids"),
        ("draft", SHORT, ON_CPU, "warning: .*the draft model ends at 512 tokens"),
        # vLLM's runner of GPUs has it draft beyond, at positions without a table.
        ("draft", SHORT, ON_GPU, "error: .*must be ≤ 512, the draft model's context"),
        # But for heads, whose table it makes as long as the target's.
        ("draft", SHORT, ON_GPU | {"policy": {"method": "eagle3"}}, "$"),
        ("target", SHORT, {}, "error: engine.max_model_len: must be ≤ 512"),
        # A scaled context counts in full, and a pair of one family passes.
        ("target", SHORT | {"rope_scaling": YARN}, {}, "$"),
    ],
)
def test_a_pair_that_does_not_fit_is_told_of_what_does_not(
    changed, config, chosen, problem, target, draft, tmp_path
):
    write_model(tmp_path / changed, **config)
    found = [
        f"{one.severity}: {one}"
        for one in check_models(pair(target, draft, **chosen))
        if one.severity in {"error", "warning"}
    ]
    assert len(found) <= 1
    assert re.match(problem, "".join(found))


def test_missing_folders_and_files_name_what_is_missing(
    target, draft, tmp_path, monkeypatch
):
    empty = tmp_path / "empty"
    empty.mkdir()
    first, second = errors(check_models(pair(str(tmp_path / "no"), str(empty))))
    assert first.startswith("model.target: no such folder")
    assert second.startswith(f"model.draft: {empty} has no config.json")
    # The draft is not looked at without speculation.
    alone = pair(target, "/nowhere", policy={"name": "none"})
    assert errors(check_models(alone)) == []
    (Path(draft) / "model.safetensors").unlink()
    (Path(target) / "config.json").write_text("{")
    broken, unweighted = errors(check_models(pair(target, draft)))
    assert "config.json is not valid JSON" in broken
    assert "has no weights" in unweighted
    # What is not in the hub's cache yet is no error.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    findings = check_models(parse_settings(minimal()))
    assert [finding.severity for finding in findings] == ["note", "note"]


def test_the_doctor_passes_this_machine(target, draft, capsys):
    port = ports.find_free("127.0.0.1", 18000)
    settings = pair(target, draft, http={"port": port}, replicas={"num_cpus": 0.1})
    assert doctor(settings) == 0
    output = capsys.readouterr().out
    for subject in ("python", "vllm", "ray", "torch", "plugin", "device", "memory"):
        assert f" {subject}: " in output
    assert output.endswith("No errors.\n")


def test_the_doctor_names_the_setting_behind_each_error(target, draft, capsys):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        settings = pair(
            target,
            draft,
            http={"port": busy.getsockname()[1]},
            replicas={"max": 1000, "num_cpus": 1},
            policy={"method": "dflash"},
            engine={"kv_cache_memory_bytes": 1 << 50},
        )
        findings = examine(settings)
        port, memory, method = sorted(errors(findings))
        assert doctor(settings) == 1
    assert port.startswith("http.port")
    assert "is in use by" in port
    assert memory.startswith("memory: ")
    assert method.startswith("policy.method: dflash does not run on engine.device: cpu")
    assert "3 error(s)" in capsys.readouterr().out
    [cpus] = [str(one) for one in findings if one.setting == "replicas.max"]
    assert cpus.startswith("replicas.max: 1000 replica(s) want 1000 CPUs")


def test_the_doctor_says_who_may_not_call(target, draft, tmp_path):
    def access(**given: Any) -> list[str]:
        http = {"host": "0.0.0.0", "port": ports.find_free("127.0.0.1", 18000)}
        return errors(examine(pair(target, draft, http=http | given)))

    [nobody_said] = access()
    assert nobody_said.startswith("http.access: anybody who reaches the server")
    [no_file] = access(access={"keys_file": str(tmp_path / "no.json")})
    assert no_file.startswith("http.access.keys_file: ")
    keys = tmp_path / "keys.json"
    assert main(["keys", "new", "--file", str(keys), "--class", "blk", "bob"]) == 0
    [no_class] = access(access={"keys_file": str(keys)})
    assert no_class.startswith("http.access.keys_file: the key 'bob' is of the class")


@pytest.mark.parametrize(
    ("built", "chosen", "fix"),
    [
        (
            "cpu",
            ON_GPU,
            "set engine.device: cpu, or set up anew with TETRIS_DEVICE=gpu",
        ),
        (
            "gpu",
            ON_CPU,
            "set engine.device: gpu, or set up anew with TETRIS_DEVICE=cpu",
        ),
        ("gpu", ON_GPU, ""),
        (None, ON_GPU, ""),
    ],
)
def test_a_vllm_for_another_device_is_told_of(
    built, chosen, fix, target, draft, monkeypatch
):
    monkeypatch.setattr("serving.commands.doctor.find_built_device", lambda: built)
    monkeypatch.setattr("serving.commands.doctor.count_gpus", lambda: 8)
    told = errors([*check_room(pair(target, draft, **chosen))])
    assert [one.rpartition(": set")[0] for one in told] == [
        f"engine.device: is {chosen['engine']['device']}, and the vLLM that is "
        f"installed here is for a {built}"
    ] * bool(fix)
    assert all(one.endswith(fix) for one in told)
