"""Where a new adapter may come from: the hub through the real client, and what is refused on the way."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from teamtr_lora.base.versions import CONFIG, WEIGHTS
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import LoraSection
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.swap.newcomer import find_incoming, fresh_lora


@pytest.fixture
def adapter(trained: Path) -> dict[str, bytes]:
    folder = trained / "adapters" / "left" / read_run(trained).versions["left"].name
    return {name: (folder / name).read_bytes() for name in (CONFIG, WEIGHTS)}


@pytest.fixture
def online(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1,localhost")
    settings = {
        "ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "hf"),
    }
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.address)
    monkeypatch.setattr("time.sleep", lambda _: None)
    close_session()
    yield hub
    close_session()


def find(spec: str, tmp_path: Path) -> Any:
    return find_incoming(spec, Registry(tmp_path / "registry"), tmp_path / "own")


def test_an_adapter_of_the_hub_arrives_as_it_is_and_is_checked(online: Any, adapter: dict[str, bytes], tmp_path: Path) -> None:
    online.add("alice/solver", {**adapter, "tokenizer.json": b"{}", "README.md": b"a card", "train.py": b"raise SystemExit"})
    incoming = find("alice/solver", tmp_path)
    assert (incoming.kind, dict(incoming.contents), incoming.tokenizer) == ("hub", adapter, b"{}")
    assert incoming.foreign
    online.add("alice/pickled", {CONFIG: adapter[CONFIG], WEIGHTS: b"\x80\x04\x95" + bytes(64)})
    with pytest.raises(UserError, match="pickle"):
        find("alice/pickled", tmp_path)
    online.add("alice/config-only", {CONFIG: adapter[CONFIG]})
    with pytest.raises(UserError, match=f"holds no {WEIGHTS}"):
        find("alice/config-only", tmp_path)
    online.add(
        "alice/odd", {**adapter, CONFIG: json.dumps(json.loads(adapter[CONFIG]) | {"modules_to_save": ["lm_head"]}).encode()}
    )
    with pytest.raises(UserError, match="modules_to_save"):
        find("alice/odd", tmp_path)
    online.add("alice/both", {**adapter, "adapter_model.bin": b"\x80\x04."})
    with pytest.raises(UserError, match=r"'adapter_model\.bin' is a pickle"):
        find("alice/both", tmp_path)
    with pytest.raises(UserError):
        find("alice/nowhere", tmp_path)


def test_links_out_of_a_folder_are_refused(adapter: dict[str, bytes], tmp_path: Path) -> None:
    folder, secret = tmp_path / "peft", tmp_path / "secret.safetensors"
    folder.mkdir()
    secret.write_bytes(adapter[WEIGHTS])
    (folder / CONFIG).write_bytes(adapter[CONFIG])
    (folder / WEIGHTS).symlink_to(secret)
    with pytest.raises(UserError, match="a link out of its folder"):
        find(str(folder), tmp_path)


@pytest.mark.parametrize(
    ("spec", "rank", "alpha", "targets", "rslora"),
    [
        ("fresh", 4, 8.0, ["q_proj"], False),
        ("fresh:rank=16", 16, 16.0, ["q_proj"], False),
        ("fresh:rank=16,alpha=5", 16, 5.0, ["q_proj"], False),
        ("fresh:rank=16,rslora=true,targets=q_proj+v_proj", 16, 4.0, ["q_proj", "v_proj"], True),
        ("fresh:targets=all-linear", 4, 8.0, "all-linear", False),
    ],
)
def test_what_a_fresh_spec_leaves_out_is_the_old_adapters(
    spec: str, rank: int, alpha: float, targets: Any, rslora: bool, tmp_path: Path
) -> None:
    lora = fresh_lora(find(spec, tmp_path).fresh, LoraSection(rank=4, alpha=8.0, targets=["q_proj"]))
    assert (lora.rank, lora.alpha, lora.targets, lora.rslora) == (rank, alpha, targets, rslora)


def test_a_slip_in_a_teams_name_is_not_looked_for_on_the_hub(
    online: Any, adapter: dict[str, bytes], tmp_path: Path, trained: Path
) -> None:
    """Whoever owns the misspelt name there would have their adapter put in."""
    registry = Registry(tmp_path / "registry")
    import_path(registry, trained, team="adders")
    online.add("aders/left", adapter)
    for spec, meant in (("aders/left", "adders/left"), ("aders/left/v1", "adders/left/v1"), ("aders", "adders")):
        with pytest.raises(UserError, match=f"did you mean '{meant}'.* user/name@main"):
            find_incoming(spec, registry, tmp_path / "own")
    assert find_incoming("adders/left", registry, tmp_path / "own").kind == "registry"
    assert find_incoming("aders/left@main", registry, tmp_path / "own").kind == "hub"
    online.add("alice/left", adapter)
    assert find_incoming("alice/left", registry, tmp_path / "own").kind == "hub", "another name, not a slip"


@pytest.mark.parametrize(
    ("before", "after", "alpha"),
    [(False, False, 8 * (16 / 4) ** 0.5), (True, True, 8.0), (False, True, 8 / 4**0.5), (True, False, 8 * 16**0.5)],
)
def test_the_default_alpha_is_what_the_documentation_says(
    before: bool, after: bool, alpha: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"fresh:rank=16,rslora={str(after).lower()}"
    assert fresh_lora(find(spec, tmp_path).fresh, LoraSection(rank=4, alpha=8.0, rslora=before)).alpha == pytest.approx(alpha)
    for command in (["docs", "plug_and_play"], ["swap", "--help"]):
        with contextlib.suppress(SystemExit):
            main(command)
        assert "sqrt(rank / old rank)" in " ".join(capsys.readouterr().out.split()), command


def test_what_is_nowhere_here_is_said_before_the_hub(online: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = f"no such folder here, nor such an adapter in the registry {tmp_path}/registry"
    looked = f"^--with 'runs/tset': {nowhere}; looked for on the hub: runs/tset: "
    with pytest.raises(UserError, match=rf"{looked}the hub does not know you \(401\)"):  # as of any name that it has not
        find("runs/tset", tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match=f"{looked}the hub could not be reached"):
        find("runs/tset", tmp_path)
