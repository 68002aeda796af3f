"""A small team for the embedded base whose adapters do something, and a registry that holds it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import FrozenBase, load_base
from teamtr_lora.recipe import AgentSection, BaseSection, LoraSection, ProtocolSection, Recipe, TeamSection
from teamtr_lora.registry.identity import Identity, identify, protocol_hash
from teamtr_lora.registry.registry_store import Registry

RECIPE = Recipe(
    base=BaseSection(source="nano"),
    team=TeamSection(
        protocol=ProtocolSection(system="Add by columns."),
        agents=[
            AgentSection(name="planner", role="ones", lora=LoraSection(rank=4, alpha=8)),
            AgentSection(
                name="checker", role="tens", lora=LoraSection(rank=2, alpha=8, targets=["q_proj", "v_proj"], rslora=True)
            ),
        ],
    ),
)


@torch.no_grad()
def stir(bank: AdapterBank, agent: str, seed: int, size: float = 0.1) -> None:
    """A fresh adapter changes nothing (B is zero): this one does."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in bank.parameters(agent).items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return RECIPE


@pytest.fixture(scope="session")
def nano() -> FrozenBase:
    return load_base("nano", device="cpu")


@pytest.fixture(scope="session")
def bank(nano: FrozenBase) -> AdapterBank:
    """Read only: other tests compare with it."""
    bank = AdapterBank(nano.model, {agent.name: agent.lora for agent in RECIPE.team.agents}, base_name="nano", seed=0)
    for seed, agent in enumerate(bank.agents):
        stir(bank, agent, seed)
    return bank


@pytest.fixture(scope="session")
def identity() -> Identity:
    return identify("nano")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory, bank: AdapterBank, identity: Identity) -> Path:
    root = tmp_path_factory.mktemp("registry")
    registry = Registry(root)
    agents = {}
    for agent in bank.agents:
        agents[agent] = registry.publish_adapter(
            "demo", agent, bank.tensors(agent), bank.config(agent), identity=identity,
            protocol_hash=protocol_hash(RECIPE.team), made_by="train", metrics={"avg_at_k": 0.5}, task="column_sum",
        ).version  # fmt: skip
    registry.publish_team("demo", RECIPE, agents, identity=identity, made_by="train", metrics={"avg_at_k": 0.5})
    return root


@pytest.fixture
def filled(template: Path, tmp_path: Path) -> Registry:
    """A registry of this test's own that holds the team `demo`."""
    shutil.copytree(template, tmp_path / "adapters")
    return Registry(tmp_path / "adapters")
