"""An adapter that was made elsewhere stays one, by whatever name it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.base.versions import CONFIG, WEIGHTS, read_adapter_folder
from teamtr_lora.cli import main
from teamtr_lora.common.files import dump_json
from teamtr_lora.registry.imports import import_path
from teamtr_lora.registry.manifest import own_hash
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.runs.stored_run import read_run


@pytest.fixture
def elsewhere(run: Path, tmp_path: Path) -> Path:
    """A PEFT folder that holds no version of the run: `left`, doubled in scale."""
    source, folder = run / "adapters" / "left" / read_run(run).versions["left"].name, tmp_path / "elsewhere"
    folder.mkdir()
    _, config = read_adapter_folder(source)
    (folder / WEIGHTS).write_bytes((source / WEIGHTS).read_bytes())
    (folder / CONFIG).write_text(dump_json(config | {"lora_alpha": 2 * config["lora_alpha"]}))
    return folder


def keep_tags(run: Path) -> None:
    """Every agent may have its own reasoning tags: nothing for strangers."""
    text = (run / "recipe.yaml").read_text()
    assert "reasoning_tags: strip" in text
    (run / "recipe.yaml").write_text(text.replace("reasoning_tags: strip", "reasoning_tags: keep"))


def looked_at(team: Path, spec: str, capsys: Any) -> tuple[int, dict[str, str], str]:
    code = main(["swap", str(team), "--agent", "left", "--with", spec, "--dry-run", "--json"])
    out, err = capsys.readouterr()
    return code, {c["check"]: c["verdict"] for c in json.loads(out)["checks"]} if out else {}, err


def test_by_its_version_of_a_registry(
    run: Path, elsewhere: Path, tmp_path: Path, recipe_file: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_tags(run)
    monkeypatch.chdir(recipe_file.parent)
    registry, team = Registry(tmp_path / "registry"), tmp_path / "registry" / "pair"
    import_path(registry, run, team="pair")
    own = registry.team("pair").agents["left"]
    foreign = import_path(registry, elsewhere, team="pair", agent="left").adapters[0].version
    code, verdicts, _ = looked_at(team, own, capsys)
    assert code == 0 and verdicts["reasoning tags"] == "ok" and verdicts["protocol"] == "ok"
    code, _, error = looked_at(team, foreign, capsys)
    assert code == 2 and "set team.protocol.reasoning_tags=strip" in error


def test_a_folder_out_of_a_registry_names_its_base(run: Path, tmp_path: Path, capsys: Any) -> None:
    """Two bases of one shape: only the hash of the weights tells that an adapter is for the other."""
    registry = Registry(tmp_path / "registry")
    team = import_path(registry, run, team="pair").team
    assert team is not None
    folder = registry.folder("pair", "left", team.agents["left"])
    assert looked_at(run, str(folder), capsys)[1]["base"] == "ok"
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    data["base"]["weights_hash"] = "0" * 64
    path.write_text(dump_json(data))
    code, _, error = looked_at(run, str(folder), capsys)
    assert code == 2 and "does not match its manifest_hash" in error
    path.write_text(dump_json(data | {"manifest_hash": own_hash(data)}))
    code, _, error = looked_at(run, str(folder), capsys)
    assert code == 2 and "the new adapter does not fit: base" in error


def test_by_its_version_of_a_run(run: Path, elsewhere: Path, capsys: Any) -> None:
    own = read_run(run).versions["left"].name
    assert main(["swap", str(run), "--agent", "left", "--with", str(elsewhere), "--direct", "--json"]) == 0
    foreign = json.loads(capsys.readouterr().out)["new"]
    keep_tags(run)
    assert looked_at(run, own, capsys)[0] == 0
    code, _, error = looked_at(run, foreign, capsys)
    assert code == 2 and "set team.protocol.reasoning_tags=strip" in error
