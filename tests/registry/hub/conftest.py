"""A user of a hub in this process, with a registry that holds a team of two."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from teamtr_lora.base.source import resolve
from teamtr_lora.cli import main
from teamtr_lora.recipe import Recipe
from teamtr_lora.registry.identity import Identity, identify_folder, protocol_hash
from teamtr_lora.registry.manifest import Replaced
from teamtr_lora.registry.pushed_files import team_parcel
from teamtr_lora.registry.registry_store import Registry

TOKEN, STRANGER = "hf_aSecretThatNobodyMaySee", "hf_anotherAccount"
REPO = "alice/team"


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """The client reads the environment's proxies when it is made: a new one for these tests, and one after them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        patch.setattr("teamtr_lora.registry.verify.identify_folder", functools.cache(identify_folder))  # nano is hashed once
        close_session()
        yield
    close_session()


@pytest.fixture(scope="module")
def pushed(identity: Identity, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a push of the team uploads, for those who spoil it."""
    registry = _store(tmp_path_factory.mktemp("registry"), identity)
    parcel = team_parcel(registry, registry.team("pair"), REPO)
    return {path: data if isinstance(data, bytes) else data.read_bytes() for path, data in parcel.files.items()}


@pytest.fixture
def waits() -> list[float]:
    return []


class _NoBars(dict[str, bool]):
    """The client's switch of its progress bars, off, also after transformers has switched them on."""

    def get(self, *_: Any) -> bool:
        return False


@pytest.fixture(autouse=True)
def online(hub: Any, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's settings as they are for a user of this hub, whose waits take no time."""
    hub.users |= {TOKEN: "alice", STRANGER: "mallory"}
    settings = {"ENDPOINT": hub.address, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    settings |= {"HF_HUB_CACHE": str(tmp_path / "hf" / "hub"), "HF_TOKEN_PATH": str(tmp_path / "hf" / "token")}
    for name, value in settings.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "progress_bar_states", _NoBars())


def _recipe(**extra: Any) -> Recipe:
    lora = {"rank": 2, "alpha": 4, "targets": ["q_proj"]}
    agents = [{"name": name, "role": name, "lora": lora} for name in ("planner", "solver")]
    return Recipe.model_validate({"team": {"agents": agents}, **extra})


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    config, made = json.loads((resolve("nano") / "config.json").read_text()), torch.Generator().manual_seed(seed)
    width, heads = config["hidden_size"], config["num_attention_heads"] * config.get("head_dim", 0)
    names = [f"base_model.model.model.layers.{i}.self_attn.q_proj" for i in range(config["num_hidden_layers"])]
    return {f"{name}.lora_A.weight": torch.randn(2, width, generator=made) for name in names} | {
        f"{name}.lora_B.weight": torch.randn(heads or width, 2, generator=made) for name in names
    }


def _config(source: str = "nano") -> dict[str, Any]:
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "none",
            "base_model_name_or_path": source}  # fmt: skip


def _store(
    root: Path, identity: Identity, *, name: str = "pair", seed: int = 0, made: Recipe | None = None, **more: Any
) -> Registry:
    """A team of two, published as training would."""
    registry, made = Registry(root), made or _recipe()
    agents = {}
    for position, agent in enumerate(("planner", "solver")):
        manifest = registry.publish_adapter(
            name, agent, _tensors(seed + position), _config(identity.base.source), identity=identity,
            protocol_hash=protocol_hash(made.team), made_by="train", metrics={"accuracy": 0.5},
        )  # fmt: skip
        agents[agent] = manifest.version
    registry.publish_team(name, made, agents, identity=identity, made_by="train", metrics={"accuracy": 0.75}, **more)
    return registry


def _swapped(registry: Registry, identity: Identity, seed: int, name: str = "pair", how: str = "swap") -> None:
    """The next version of a team, with another solver."""
    team = registry.team(name)
    manifest = registry.publish_adapter(
        name,
        "solver",
        _tensors(seed),
        _config(identity.base.source),
        identity=identity,
        protocol_hash=team.protocol_hash,
        made_by="swap",
    )
    step = Replaced(agent="solver", old=team.agents["solver"], new=manifest.version, how=how)
    agents = {**team.agents, "solver": manifest.version}
    registry.publish_team(name, team.load_recipe(), agents, identity=identity, made_by="swap", lineage=[step])


def _files(root: Path) -> dict[str, bytes]:
    """Everything that is not hidden."""
    found = {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not any(part.startswith(".") for part in Path(name).parts)}


@pytest.fixture
def make_recipe() -> Callable[..., Recipe]:
    return _recipe


@pytest.fixture
def store() -> Callable[..., Registry]:
    return _store


@pytest.fixture
def swapped() -> Callable[..., None]:
    return _swapped


@pytest.fixture
def files() -> Callable[[Path], dict[str, bytes]]:
    return _files


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail with exit code 2, and returns its one line."""

    def run(*words: object) -> str:
        code = main([str(word) for word in words])
        output = capsys.readouterr()
        lines = output.err.strip().splitlines()
        assert code == 2 and output.out == "" and len(lines) == 1, (code, output)
        return lines[0]

    return run
