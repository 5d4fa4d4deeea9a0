"""API keys in front of the real web application: who gets in, and how often."""

import asyncio
import base64
import json
import re
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from serving.cli import main
from serving.engine.shared import request_classes
from serving.front import key_ring
from serving.front.access import AccessOptions, scope_of
from serving.front.app import build_api
from serving.front.caller import Caller, caller
from serving.front.key_ring import KeyRing
from serving.front.request_class import (
    ClassShare,
    claim_class,
    find_unknown_class,
    set_priority,
)
from serving.settings.key_file import read_keys
from serving.settings.model import parse_settings
from tests.serving.test_settings import minimal

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"


def make(file: Path, name: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["keys", "new", "--file", str(file), name, *more]) == 0
    return capsys.readouterr().out.strip()


def client_of(file: Path) -> httpx.AsyncClient:
    api = build_api(1024, AccessOptions(str(file), None, {"bulk"}))

    @api.post(CHAT)
    async def chat() -> dict[str, Any]:
        whose = caller.get()
        whose.charge(60)
        return {"whose": whose.name, "class": whose.request_class}

    @api.get("/health")
    @api.get("/board/events")
    @api.get("/new")
    async def other() -> dict[str, Any]:
        return {}

    transport = httpx.ASGITransport(api)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_a_key_opens_what_its_scopes_say(tmp_path, capsys):
    file = tmp_path / "keys.json"
    chat = make(file, "ann", capsys, "--class", "bulk")
    watch = make(file, "prometheus", capsys, "--scope", "metrics")
    assert chat not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    async with client_of(file) as client:
        answer = await client.post(CHAT, headers=bearer(chat))
        assert answer.json() == {"whose": "ann", "class": "bulk"}
        assert (await client.get("/health")).status_code == 200
        wrong = ["x", b"Basic \xe9", "Basic e", "Basic /w=="]
        for headers in (
            *({}, bearer("wrong"), bearer("\x7f")),
            *({"Authorization": one} for one in wrong),
        ):
            refused = await client.post(CHAT, headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "AuthenticationError"
            assert refused.headers["www-authenticate"].startswith("Bearer")
        assert (await client.post(CHAT, headers=bearer(watch))).status_code == 403
        assert (await client.get("/new", headers=bearer(chat))).status_code == 403
        # A browser asks for it as a password, and no other site's page may use that.
        asked = (await client.get("/board/events")).headers["www-authenticate"]
        assert asked.startswith("Basic")
        basic = base64.b64encode(f":{watch}".encode()).decode()
        shown = {"Authorization": f"Basic {basic}"}
        assert (await client.get("/board/events", headers=shown)).status_code == 200
        shown["Sec-Fetch-Site"] = "cross-site"
        assert (await client.get("/board/events", headers=shown)).status_code == 401


def test_every_route_that_nobody_named_begins_closed():
    paths = ("/health", "/v1/models", "/board")
    assert [*map(scope_of, paths)] == [None, "chat", "metrics"]
    for path in ("/new", "/v1/load_lora_adapter", "/health/", "//v1/models", "/v1"):
        assert scope_of(path) == "admin"
    assert scope_of("/BOARD") == "admin"


def test_keys_are_followed_without_a_restart_as_long_as_they_can_be_read(
    tmp_path, capsys
):
    file, now_s = tmp_path / "keys.json", 0.0
    first = make(file, "ann", capsys)
    ring = KeyRing(str(file), set(), clock=lambda: now_s)
    second = make(file, "bob", capsys)
    assert ring.find(second) is None
    now_s = 2.0
    assert ring.find(second) is not None
    assert main(["keys", "revoke", "--file", str(file), "ann"]) == 0
    now_s = 4.0
    assert ring.find(first) is None
    # Half a file or no file at all changes nothing.
    for content in ("{", None):
        file.unlink()
        if content is not None:
            file.write_text(content)
        now_s += 2.0
        assert ring.find(second) is not None
    with pytest.raises(FileNotFoundError):
        KeyRing(str(file), set())


def test_a_class_that_came_later_keeps_no_revoked_key_alive(tmp_path, capsys):
    file, now_s = tmp_path / "keys.json", 0.0
    ann = make(file, "ann", capsys)
    ring = KeyRing(str(file), set(), clock=lambda: now_s)
    bob = make(file, "bob", capsys, "--class", "gold")
    assert main(["keys", "revoke", "--file", str(file), "ann"]) == 0
    now_s = 2.0
    for one in (ring, KeyRing(str(file), set())):
        assert one.find(ann) is None
        assert one.find(bob) is not None


def test_a_file_that_may_be_read_again_is_read_again(tmp_path, capsys, monkeypatch):
    """Who may read it is no change of what is in it."""
    file, now_s = tmp_path / "keys.json", 0.0
    first = make(file, "ann", capsys)
    ring = KeyRing(str(file), set(), clock=lambda: now_s)
    owners: list[tuple[int, int]] = []
    monkeypatch.setattr("os.fchown", lambda _, *ids: owners.append(ids))
    assert main(["keys", "revoke", "--file", str(file), "ann"]) == 0
    stat = file.stat()
    assert owners == [(stat.st_uid, stat.st_gid)]

    def refuse(_path: Any) -> Any:
        raise PermissionError

    with monkeypatch.context() as context:
        context.setattr(key_ring, "read_keys", refuse)
        now_s = 2.0
        assert ring.find(first) is not None
    file.chmod(0o640)
    now_s = 4.0
    assert ring.find(first) is None


def test_a_secret_s_file_is_followed_to_wherever_it_leads(tmp_path, capsys):
    """As kubelet replaces one: `keys.json` leads to `..data`, and that to a folder."""
    now_s = 0.0
    for name in ("..old", "..new"):
        (tmp_path / name).mkdir()
    old = make(tmp_path / "..old" / "keys.json", "ann", capsys)
    new = make(tmp_path / "..new" / "keys.json", "ann", capsys)
    (tmp_path / "..data").symlink_to("..old")
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    http = {"access": {"keys_file": str(tmp_path / "keys.json")}}
    file = parse_settings(minimal(http=http)).http.access.keys_file
    ring = KeyRing(str(file), set(), clock=lambda: now_s)
    assert ring.find(old) is not None
    (tmp_path / "..next").symlink_to("..new")
    (tmp_path / "..next").replace(tmp_path / "..data")
    shutil.rmtree(tmp_path / "..old")
    now_s = 2.0
    assert ring.find(old) is None
    assert ring.find(new) is not None


def test_the_command_lists_and_refuses(tmp_path, capsys):
    file = tmp_path / "keys.json"
    make(file, "ann", capsys, "--max-concurrent", "2")
    assert main(["keys", "list", "--file", str(file)]) == 0
    assert capsys.readouterr().out == "ann  chat  max_concurrent=2\n"
    assert main(["keys", "new", "--file", str(file), "ann"]) == 1
    assert main(["keys", "new", "--file", str(file), "a/b"]) == 1
    assert main(["keys", "revoke", "--file", str(file), "bob"]) == 1
    assert list(read_keys(file)) == ["ann"]
    assert list(tmp_path.iterdir()) == [file]
    # What is refused is not repeated.
    file.write_text(json.dumps({"ann": {"sha256": "tetris-secret"}}))
    with pytest.raises(ValueError, match=r"ann\.sha256") as refused:
        read_keys(file)
    assert "tetris-secret" not in str(refused.value)


async def test_tokens_that_were_used_end_in_429(tmp_path, capsys):
    """Requests do, in key_life.sh, with OpenAI's headers."""
    file = tmp_path / "keys.json"
    key = make(file, "short", capsys, "--tokens-per-minute", "100")
    async with client_of(file) as client:
        answers = []
        for _ in range(3):
            answers.append(await client.post(CHAT, headers=bearer(key)))
            charging = [t for t in asyncio.all_tasks() if "RateLimits._use" in repr(t)]
            await asyncio.gather(*charging)
    assert [one.status_code for one in answers] == [200, 200, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert answers[-1].json()["error"]["type"] == "RateLimitError"


def test_with_a_key_the_request_chooses_neither_class_nor_priority():
    request = SimpleNamespace(vllm_xargs={"request_class": "vip"}, priority=-9)
    claim_class(request, {})
    assert request.priority == -9
    # A live change may have dropped the last one.
    for own, xargs in (
        ("bulk", {"request_class": "bulk"}),
        (None, None),
        ("gone", None),
    ):
        whose = Caller("ann", own, lambda _: None, lambda _: None)
        token = caller.set(whose)
        claim_class(request, {"bulk": ClassShare(), "vip": ClassShare()})
        caller.reset(token)
        assert (request.vllm_xargs, request.priority) == (xargs, 0)


def test_a_named_class_sets_its_priority_and_an_unknown_one_is_refused():
    classes = {"chat": ClassShare(priority=-1), "bulk": ClassShare()}
    unknown = r"no such class .*(chta|chat)'.*; .* policy\.classes \(bulk, chat\)"
    for name, known, problem, priority in (
        ("chat", classes, "^$", -1),
        ("bulk", classes, "^$", 7),
        ("chta", classes, unknown, 7),
        # Something else than a name.
        (["chat"], classes, unknown, 7),
        ("chat", {}, "none are configured", 7),
    ):
        # The scheduler reads the same key.
        xargs = {request_classes.REQUEST_CLASS_XARG: name}
        request: Any = SimpleNamespace(vllm_xargs=xargs, priority=7)
        assert re.search(problem, find_unknown_class(request, known) or "")
        set_priority(request, known)
        assert request.priority == priority
    # Requests of other kinds name none.
    other: Any = SimpleNamespace()
    assert find_unknown_class(other, classes) is None
    set_priority(other, classes)
    assert not hasattr(other, "priority")
