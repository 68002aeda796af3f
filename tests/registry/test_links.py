"""A stranger's registry with links where files and folders are expected: nothing behind them is read, changed or removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import teamtr_lora
from teamtr_lora.cli import main
from teamtr_lora.registry.registry_store import Registry

SHIPPED = Path(teamtr_lora.__file__).parent.parent / "adapters"
TEAM = "column_sum"
PLACES: dict[str, Callable[[Path, Path], Path]] = {
    "a lock": lambda root, version: root / f".{TEAM}.lock",
    "a pull's lock": lambda root, version: root / ".pull",
    "a pull's folder": lambda root, version: root / ".tmp-pull",
    "what is being removed": lambda root, version: root / f".tmp-removed-{TEAM}",
    "unfinished in a team": lambda root, version: root / TEAM / ".tmp-1-x",
    "unfinished in an agent": lambda root, version: version.parent / ".tmp-1-x",
    "a team": lambda root, version: root / TEAM,
    "an agent": lambda root, version: version.parent,
    "a version": lambda root, version: version,
    "weights": lambda root, version: version / "adapter_model.safetensors",
    "a config": lambda root, version: version / "adapter_config.json",
    "a manifest": lambda root, version: version / "manifest.json",
    "a card": lambda root, version: version / "README.md",
    "a team's file": lambda root, version: root / TEAM / "team-0001.json",
}


@pytest.mark.parametrize("target", ["file", "folder"])
@pytest.mark.parametrize("place", PLACES)
def test_nothing_behind_a_link_changes(place: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = tmp_path / "victim"
    (victim / "folder").mkdir(parents=True)
    for name in ("file", "folder/inner"):
        (victim / name).write_text("precious")
    agent = Registry(SHIPPED).agents(TEAM)[0]
    version = Registry(SHIPPED).versions(TEAM, agent)[0]
    commands = [["list"], ["show", TEAM], ["verify"], ["rm", TEAM, "--agent", agent, "--version", version], ["rm", TEAM, "--all"]]
    for command in commands:
        root = tmp_path / "registry"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(SHIPPED, root)
        link = PLACES[place](root, root / TEAM / agent / version)
        if link.is_dir():
            shutil.rmtree(link)
        link.unlink(missing_ok=True)
        link.symlink_to(victim / target)
        assert main(["adapters", *command, "--registry", str(root)]) in (0, 2), command
        assert "crashed" not in capsys.readouterr().err
        assert {(victim / name).read_text() for name in ("file", "folder/inner")} == {"precious"}
        if command == ["verify"] and not link.name.startswith("."):
            assert main(["adapters", "verify", "--registry", str(root)]) == 2, "and it is told"
