"""The upload middleware as a server would call it: what it takes, and everything that it must not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from teamtr_lora.rollout.adapter_upload import CONFIG_KEY, PATH, AdapterUpload

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 16.0, "use_rslora": False, "bias": "none", "target_modules": ["q_proj"]}
TENSORS = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": np.ones((2, 8), np.float32),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": np.ones((6, 2), np.float16),
}
A = next(iter(TENSORS))

Ask = Callable[..., tuple[int, dict[str, Any]]]


def body(config: Any = CONFIG, tensors: dict[str, Any] = TENSORS) -> bytes:
    return save(tensors, {"format": "pt", CONFIG_KEY: config if isinstance(config, str) else json.dumps(config)})


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": b'{"from": "vllm"}'})


@pytest.fixture
def uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TEAMTR_LORA_UPLOADS", str(tmp_path / "uploads"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path / "uploads"


@pytest.fixture
def ask(uploads: Path) -> Ask:
    middleware = AdapterUpload(inner)
    middleware.max_bytes = 200_000

    def call(
        method: str, name: str = "", data: bytes = b"", *, path: str | None = None, headers: dict[str, str] | None = None,
        keys: list[str] | None = None, cut: bool = False, app: Any = None, root_path: str = "",
    ) -> tuple[int, dict[str, Any]]:  # fmt: skip
        state = SimpleNamespace(args=SimpleNamespace(api_key=keys))
        scope = {
            "type": "http",
            "method": method,
            "path": path if path is not None else f"{PATH}/{name}" if name else PATH,
            "root_path": root_path,
            "headers": [(key.lower().encode(), value.encode()) for key, value in (headers or {}).items()],
            "app": app or SimpleNamespace(state=state),
        }
        chunks = [data[i : i + 100] for i in range(0, len(data), 100)] or [b""]
        events = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
        if cut:
            events.append({"type": "http.disconnect"})
        else:
            events[-1]["more_body"] = False
        sent: list[Any] = []

        async def receive() -> Any:
            return events.pop(0)

        async def send(event: Any) -> None:
            sent.append(event)

        asyncio.run(middleware(scope, receive, send))
        return sent[0]["status"], json.loads(sent[1]["body"])

    return call


def test_an_adapter_is_stored_as_vllm_reads_it_and_removed(ask: Ask, uploads: Path) -> None:
    assert ask("GET") == (200, {"max_bytes": 200_000})
    status, answer = ask("PUT", "planner.v0001-abc.1f-1", body())
    folder = uploads / "planner.v0001-abc.1f-1"
    assert status == 200 and answer == {"path": str(folder)}
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text()) == CONFIG
    assert all((load_file(folder / "adapter_model.safetensors")[name] == tensor).all() for name, tensor in TENSORS.items())
    assert ask("DELETE", "planner.v0001-abc.1f-1")[0] == 200
    assert list(uploads.iterdir()) == []
    assert ask("DELETE", "planner.v0001-abc.1f-1")[0] == 404


def test_nothing_is_overwritten(ask: Ask, uploads: Path) -> None:
    assert ask("PUT", "a", body())[0] == 200
    before = (uploads / "a" / "adapter_model.safetensors").read_bytes()
    other = {name: tensor * 2 for name, tensor in TENSORS.items()}
    assert ask("PUT", "a", body(tensors=other))[0] == 409
    assert (uploads / "a" / "adapter_model.safetensors").read_bytes() == before
    assert [path.name for path in uploads.iterdir()] == ["a"]


def test_other_paths_are_the_servers_own(ask: Ask) -> None:
    for path in ("/v1/models", "/v1/teamtr/adaptersx", "/", "/v1/teamtr"):
        assert ask("PUT", path=path, data=body()) == (299, {"from": "vllm"})


def test_a_prefix_of_the_server_is_left_out(ask: Ask, uploads: Path) -> None:
    assert ask("PUT", path=f"/behind{PATH}/a", root_path="/behind", data=body())[0] == 200
    assert (uploads / "a").is_dir()


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "a/../../b", ".tmp-x", "-a", "a b", "ä", "a\\b", "x" * 129, "a\n", "/etc"])
def test_a_name_never_leaves_the_folder(ask: Ask, uploads: Path, name: str) -> None:
    (uploads.parent / "x").mkdir()
    for method in ("PUT", "DELETE"):
        assert ask(method, name, body())[0] == 400
    assert list(uploads.iterdir()) == [] and sorted(p.name for p in uploads.parent.iterdir()) == ["uploads", "x"]


@pytest.mark.parametrize(
    "config",
    [
        CONFIG | {"auto_mapping": {"base_model_class": "x"}},
        CONFIG | {"modules_to_save": ["lm_head"]},
        CONFIG | {"trust_remote_code": True},
        CONFIG | {"use_dora": True},
        CONFIG | {"init_lora_weights": "pissa"},
        CONFIG | {"rank_pattern": {"q_proj": 4}},
        CONFIG | {"bias": "all"},
        CONFIG | {"peft_type": "IA3"},
        CONFIG | {"r": 0},
        CONFIG | {"r": 100_000},
        CONFIG | {"r": 3},  # not the tensors'
        CONFIG | {"r": True},
        CONFIG | {"lora_alpha": float("inf")},
        CONFIG | {"lora_alpha": -1},
        CONFIG | {"target_modules": ".*"},
        CONFIG | {"target_modules": []},
        {key: value for key, value in CONFIG.items() if key != "r"},
        [1, 2],
        "no json",
        "[" * 100_000,
    ],
)
def test_only_plain_lora_configs_are_taken(ask: Ask, uploads: Path, config: Any) -> None:
    status, answer = ask("PUT", "a", body(config))
    assert status == 400 and "error" in answer
    assert list(uploads.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04pickle",
        body()[:-1],
        body() + b"more",
        save(TENSORS),  # no config
        body(tensors={}),
        body(tensors=TENSORS | {"base_model.model.lm_head.weight": np.ones((2, 2), np.float32)}),
        body(tensors={A: np.ones((2, 8), np.int64)}),
        body(tensors={A: np.ones((2, 8, 1), np.float32)}),
        body(tensors={A: np.ones((3, 8), np.float32)}),
        body(tensors={"base_model.model.../x.lora_A.weight": np.ones((2, 8), np.float32)}),
    ],
)
def test_only_safetensors_of_lora_matrices_are_taken(ask: Ask, uploads: Path, data: bytes) -> None:
    assert ask("PUT", "a", data)[0] == 400
    assert list(uploads.iterdir()) == []


def test_too_much_is_refused_before_and_while_it_arrives(ask: Ask, uploads: Path) -> None:
    big = body(tensors={A: np.ones((2, 40_000), np.float32)})
    assert len(big) > 200_000
    assert ask("PUT", "a", big, headers={"Content-Length": str(len(big))})[0] == 413
    assert ask("PUT", "a", big)[0] == 413
    assert ask("PUT", "a", body(), headers={"Content-Length": "x"})[0] == 413
    assert list(uploads.iterdir()) == []


def serving(*loaded: Path) -> Any:
    """An app that shows, as vLLM does, which folders it has loaded."""
    requests = {path.name: SimpleNamespace(lora_path=str(path)) for path in loaded}
    models = SimpleNamespace(lora_requests=requests)
    return SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(api_key=None), openai_serving_models=models))


def aged(uploads: Path, *names: str) -> None:
    for age, name in enumerate(names):
        os.utime(uploads / name, (1000 + age, 1000 + age))


def test_the_oldest_unused_go_first(ask: Ask, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterUpload, "max_stored", 3)
    for name in ("a", "b", "c"):
        assert ask("PUT", name, body(), app=serving())[0] == 200
    aged(uploads, "a", "b", "c")
    assert ask("PUT", "d", body(), app=serving(uploads / "a"))[0] == 200
    assert sorted(path.name for path in uploads.iterdir()) == ["a", "c", "d"], "a is older than b, but loaded"
    aged(uploads, "a", "c", "d")
    for number in range(20):
        assert ask("PUT", f"n{number}", body(), app=serving(uploads / "a"))[0] == 200
    assert len(list(uploads.iterdir())) == 3 and (uploads / "a").is_dir()


def test_where_all_are_in_use_there_is_no_room(ask: Ask, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterUpload, "max_stored", 2)
    ask("PUT", "a", body(), app=serving()), ask("PUT", "b", body(), app=serving())
    for app in (serving(uploads / "a", uploads / "b"), None):  # None: a vLLM that does not show what it has loaded
        status, answer = ask("PUT", "c", body(), app=app)
        assert status == 507 and "in use" in answer["error"]
    assert sorted(path.name for path in uploads.iterdir()) == ["a", "b"]


def test_bytes_are_bounded_too(ask: Ask, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(body()) + 1000  # with its config
    monkeypatch.setattr(AdapterUpload, "max_total_bytes", 3 * size)
    for number in range(10):
        headers = {"Content-Length": str(len(body()))}
        assert ask("PUT", f"n{number}", body(), app=serving(), headers=headers)[0] == 200
        assert sum(file.stat().st_size for file in uploads.rglob("*") if file.is_file()) <= 3 * size + 1000


def test_only_so_many_arrive_at_once(ask: Ask, uploads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AdapterUpload, "max_at_once", 0)
    assert ask("PUT", "a", body(), app=serving())[0] == 503
    assert list(uploads.iterdir()) == []


def test_an_upload_that_is_cut_short_leaves_nothing(ask: Ask, uploads: Path) -> None:
    assert ask("PUT", "a", body(), cut=True)[0] == 400
    assert list(uploads.iterdir()) == []
    assert ask("PUT", "a", body())[0] == 200


@pytest.mark.parametrize("where", ["option", "environment"])
def test_a_servers_key_is_asked_for(ask: Ask, uploads: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["one", "two"] if where == "option" else None
    if where == "environment":
        monkeypatch.setenv("VLLM_API_KEY", "two")
    assert ask("PUT", "kept", body(), keys=keys, headers={"Authorization": "bearer two"})[0] == 200
    for header in ({}, {"Authorization": "two"}, {"Authorization": "Bearer three"}, {"Authorization": "Basic two"},
                   {"Authorization": "Bearer "}, {"Authorization": "Bearer twox"}):  # fmt: skip
        for method, name in (("PUT", "a"), ("DELETE", "kept"), ("GET", ""), ("PUT", "..")):
            assert ask(method, name, body(), keys=keys, headers=header) == (401, {"error": "Unauthorized"})
    assert [path.name for path in uploads.iterdir()] == ["kept"]


def test_the_key_is_asked_for_on_every_path_that_does_something(ask: Ask) -> None:
    """vLLM itself asks on /v1 only."""
    for path in ("/adapters", "/invocations", "/v1/models"):
        assert ask("POST", path=path, keys=["one"])[0] == 401
        assert ask("POST", path=path, keys=["one"], headers={"Authorization": "Bearer one"})[0] == 299
        assert ask("POST", path=path)[0] == 299
    assert ask("GET", path="/health", keys=["one"])[0] == 299


def test_the_option_comes_before_the_environment_as_in_vllm(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "two")
    assert ask("GET", keys=["one"], headers={"Authorization": "Bearer one"})[0] == 200
    assert ask("GET", keys=["one"], headers={"Authorization": "Bearer two"})[0] == 401


def test_where_keys_cannot_be_told_nobody_may(ask: Ask, uploads: Path) -> None:
    assert ask("PUT", "a", body(), app=SimpleNamespace(state=SimpleNamespace()))[0] == 503
    assert list(uploads.iterdir()) == []


def test_web_pages_and_other_methods_are_refused(ask: Ask, uploads: Path) -> None:
    assert ask("PUT", "a", body(), headers={"Origin": "http://evil.example"})[0] == 403
    assert ask("POST", "a", body())[0] == 405
    assert list(uploads.iterdir()) == []


def test_without_a_folder_there_is_a_private_one_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEAMTR_LORA_UPLOADS", raising=False)
    middleware = AdapterUpload(inner)
    root = middleware.root
    assert root.is_dir() and root.stat().st_mode & 0o077 == 0
    middleware._own.cleanup()
    assert not root.exists()
