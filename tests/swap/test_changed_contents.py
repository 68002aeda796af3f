"""The same command with other weights under the same names is another swap, and another rebase."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from teamtr_lora.base.versions import CONFIG, WEIGHTS
from teamtr_lora.cli import main
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.runs.metrics import SwapRow, read_rows
from teamtr_lora.runs.stored_run import read_run
from teamtr_lora.runs.work import Work
from teamtr_lora.swap.places import find_place
from teamtr_lora.swap.rebase import _Rebase
from teamtr_lora.swap.replace import swapped
from teamtr_lora.swap.swap_report import SwapOptions


@pytest.fixture
def lora(run: Path, tmp_path: Path) -> Path:
    """A PEFT folder outside the run: the agent's first adapter, which says nothing of its own yet."""
    first = next((run / "adapters" / "left").glob("v0000-*"))
    (tmp_path / "lora").mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(first / name, tmp_path / "lora" / name)
    return tmp_path / "lora"


def saved_again(weights: Path) -> None:
    """Weights of the same shapes, all different."""
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


def swap(run: Path, lora: Path, *more: str) -> int:
    arguments = ["--agent", "left", "--with", str(lora), "--delta-align", "0.3", "--json", *more]
    return main(["swap", str(run), *arguments, "--registry", str(run.parent / "no-registry")])


def test_an_interrupted_swap_starts_anew_with_another_adapter_of_the_same_name(
    run: Path,
    lora: Path,
    trained: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    without_times: Callable[[Any], Any],
) -> None:
    real = Work.put_tensors

    def killed(*args: Any) -> None:
        real(*args)
        raise SystemExit("killed")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Work, "put_tensors", killed)
        swap(run, lora)
    assert list((run / ".swap").glob("stage0-*")), "Stage-0 had begun"
    saved_again(lora / WEIGHTS)
    undisturbed = Path(shutil.copytree(trained, tmp_path / "undisturbed"))
    found = []
    for folder in (run, undisturbed):
        capsys.readouterr()
        assert swap(folder, lora) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert without_times(found[0]["alignment"]) == without_times(found[1]["alignment"])
    assert read_run(run).versions["left"] == read_run(undisturbed).versions["left"]


def test_a_finished_swap_is_finished_unless_its_adapter_has_changed(run: Path, lora: Path, capsys: Any) -> None:
    options = SwapOptions("left", str(lora), delta_align=0.3, stage0=False)

    def killed_after_the_commit() -> None:
        with pytest.raises(SystemExit), swapped(find_place(run), options, registry=Registry(run.parent / "no-registry")):
            raise SystemExit("killed")
        assert (run / ".swap").exists()

    def swaps() -> int:
        return sum(isinstance(row, SwapRow) for row in read_rows(run))

    killed_after_the_commit()
    first = read_run(run).versions["left"]
    assert swap(run, lora, "--direct") == 0, "only the report was missing"
    assert swaps() == 1 and read_run(run).versions["left"] == first and not (run / ".swap").exists()
    saved_again(lora / WEIGHTS)
    killed_after_the_commit()
    second = read_run(run).versions["left"]
    saved_again(lora / WEIGHTS)
    assert swap(run, lora, "--direct") == 0
    third = read_run(run).versions["left"]
    assert swaps() == 3 and len({version.content_hash for version in (first, second, third)}) == 3
    saved_again(lora / WEIGHTS)
    killed_after_the_commit()
    shutil.rmtree(lora)
    capsys.readouterr()
    assert swap(run, lora, "--direct") == 0, "what was wanted is done"
    assert json.loads(capsys.readouterr().out)["new"] == read_run(run).versions["left"].name and swaps() == 4


def test_an_interrupted_rebase_starts_anew_on_other_weights(
    trained: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, work = Path(shutil.copytree(tiny_base, tmp_path / "other")), Work(tmp_path / ".moved.rebase")

    def interrupted() -> Any:
        """Killed as soon as it has found what is left of the work; the part that was finished then."""
        with pytest.raises(SystemExit):
            main(["rebase", str(trained), "--to", str(other), "--out", str(tmp_path / "moved"), "--probe-contexts", "8"])
        return work.get("direct")

    def killed(*_: Any) -> None:
        raise SystemExit("killed")

    monkeypatch.setattr(_Rebase, "_leave_old_base", killed)
    saved_again(other / "model.safetensors")  # the team's own base would be refused
    interrupted()
    work.put("direct", {"accuracy": 0.5})
    assert interrupted() == {"accuracy": 0.5}
    saved_again(other / "model.safetensors")
    assert interrupted() is None, "another base's accuracy"
