"""Checkpoints: exact, checked, and never lost to a full disk."""

import errno
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common import files
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TrainingSection
from teamtr_lora.runs import checkpoint
from teamtr_lora.runs.checkpoint import CheckpointStore
from teamtr_lora.runs.run_state import Dials, RunState
from teamtr_lora.training.optimizers import build_optimizer, flatten_state, restore_state


def state_at(step: int) -> RunState:
    return RunState(
        step=step,
        stage=3,
        update=1,
        cursor=48,
        versions={"left": AdapterVersion("left", 2, "ab" * 32)},
        dials={"left": Dials(0.1 + 0.2, 0.02, rate=1 / 3), "right": Dials(1e-4, 0.02, slope=0.7)},
        loss_scaler={"scale": 4096.0},
        counts={"updates": 7, "accepted": 5, "shrunk": 2, "rejected": 1, "skipped": 1, "out_of_region_accepted": 0},
        sampled_tokens=12345,
        seconds=1 / 3,
        metrics_bytes=999,
        accuracy_before=0.1,
        accuracy_after=None,
        episodes_evaluated=64,
        started=True,
    )


def trained() -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 2, generator=generator)) for _ in range(2)]
    optimizer = build_optimizer(TrainingSection(learning_rate=0.01), parameters)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return parameters, optimizer


def save(store: CheckpointStore, step: int) -> None:
    store.save(state_at(step), {"left": flatten_state(trained()[1]), "right": ({}, {})})


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoint").iterdir())


def test_the_state_comes_back_exactly(tmp_path: Path) -> None:
    """As it was when the checkpoint was prepared, whatever has happened since."""
    now = state_at(4)
    write = CheckpointStore(tmp_path).prepared(now, {"left": flatten_state(trained()[1]), "right": ({}, {})})
    now.step, now.stage = 5, 9
    now.dials["left"], now.counts["updates"] = Dials(1.0, 1.0), 0
    torch.rand(1)
    drawn = torch.get_rng_state()
    write()
    state, optimizers = CheckpointStore(tmp_path).load()
    assert state == state_at(4) and not torch.equal(torch.get_rng_state(), drawn)
    assert optimizers["right"] == ({}, {})
    parameters, original = trained()
    fresh = build_optimizer(TrainingSection(learning_rate=0.01), parameters)
    restore_state(fresh, *optimizers["left"])
    mine, theirs = fresh.state_dict()["state"], original.state_dict()["state"]
    assert mine.keys() == theirs.keys() and len(mine) == 2
    for index, moments in theirs.items():
        assert moments.keys() == mine[index].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(moments[key], mine[index][key]) for key in moments)


def draws() -> tuple[Any, ...]:
    return (
        [random.random() for _ in range(3)], random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(),
        torch.rand(3).tolist(), torch.randn(1).item(),
    )  # fmt: skip


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    """Python, numpy and torch; an odd number of normal draws leaves a second one waiting in each, which must come too."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
        save(CheckpointStore(tmp_path), 1)
        wanted = draws()
        random.seed(99), np.random.seed(99), torch.manual_seed(99)
        CheckpointStore(tmp_path).load()
        assert draws() == wanted
    finally:
        random.setstate(python), np.random.set_state(numpy), torch.set_rng_state(torch_state)


def test_saving_draws_nothing(tmp_path: Path) -> None:
    before = random.getstate(), torch.get_rng_state()
    save(CheckpointStore(tmp_path), 1)
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert not store.exists()
    for step in (8, 9, 10, 11):
        save(store, step)
        assert store.exists() and store.load()[0].step == step
    assert steps(tmp_path) == ["step-000010", "step-000011"]


def test_the_same_step_can_be_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 2):
        save(store, step)
    assert steps(tmp_path) == ["step-000001", "step-000002"] and store.load()[0].step == 2


@pytest.mark.parametrize("links", [True, False])
def test_only_moments_that_changed_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Also where the file system has no hard links, and when the checkpoint that had them first is gone."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    store, serialised = CheckpointStore(tmp_path), []
    real = checkpoint.save_safetensors
    monkeypatch.setattr(checkpoint, "save_safetensors", lambda tensors: serialised.append(set(tensors)) or real(tensors))
    same, first, second = ({"0/exp_avg": torch.full((2,), value)} for value in (1.0, 2.0, 3.0))
    for step, other in enumerate((first, second, second, first), 1):
        store.save(state_at(step), {"left": (same, {}), "right": (other, {"0/step": step})})
        loaded = CheckpointStore(tmp_path).load()[1]
        assert torch.equal(loaded["left"][0]["0/exp_avg"], same["0/exp_avg"])
        assert torch.equal(loaded["right"][0]["0/exp_avg"], other["0/exp_avg"]) and loaded["right"][1] == {"0/step": step}
    assert [len(names & {"0/exp_avg"}) for names in serialised] == [0, 1, 1, 0, 1, 0, 0, 1], "generators first, each time"
    older, newest = (tmp_path / "checkpoint" / name for name in steps(tmp_path))
    shared = [
        os.path.samefile(older / f"moments-{a}.safetensors", newest / f"moments-{a}.safetensors") for a in ("left", "right")
    ]
    assert shared == [links, False]
    shutil.rmtree(older)
    assert CheckpointStore(tmp_path).load()[0].step == 4
    shutil.rmtree(newest)  # by hand, while the run goes on
    store.save(state_at(5), {"left": (same, {})})
    assert torch.equal(store.load()[1]["left"][0]["0/exp_avg"], same["0/exp_avg"])


@pytest.mark.parametrize("agent", ["../left", "a/../../left"])
def test_a_strangers_checkpoint_cannot_name_files_elsewhere(tmp_path: Path, agent: str) -> None:
    save(CheckpointStore(tmp_path), 1)
    folder = tmp_path / "checkpoint" / "step-000001"
    body = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(body | {"moments": [agent]}))
    manifest = {"state.json": files.sha256((folder / "state.json").read_bytes())}
    (folder / "manifest.json").write_text(json.dumps(json.loads((folder / "manifest.json").read_text()) | manifest))
    with pytest.raises(UserError, match="damaged .*is no name of a file"):
        CheckpointStore(tmp_path).load()


def flip(path: Path, at: int = -5) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: flip(f / "state.json", 40),
        lambda f: flip(f / "tensors.safetensors"),
        lambda f: flip(f / "moments-left.safetensors"),
        lambda f: flip(f / "manifest.json", 20),
        lambda f: (f / "tensors.safetensors").write_bytes((f / "tensors.safetensors").read_bytes()[:-100]),
        lambda f: (f / "state.json").write_text(""),
        lambda f: (f / "manifest.json").write_text("{"),
        lambda f: (f / "manifest.json").write_text("[1]"),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "tensors.safetensors").unlink(),
        lambda f: (f / "moments-left.safetensors").unlink(),
        lambda f: [p.unlink() for p in f.iterdir()],
    ],
    ids=["state", "tensors", "moments", "manifest", "short tensors", "empty state", "half a manifest", "other json",
         "no manifest", "no tensors", "no moments", "empty"],
)  # fmt: skip
def test_damage_is_one_line_with_folder_and_fix_and_the_older_one_stays(tmp_path: Path, spoil) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    newest = tmp_path / "checkpoint" / "step-000002"
    spoil(newest)
    generators = random.getstate(), torch.get_rng_state()
    with pytest.raises(UserError) as caught:
        store.load()
    line = str(caught.value)
    assert str(newest) in line and "damaged" in line and "step-000001" in line and "\n" not in line
    assert random.getstate() == generators[0] and torch.equal(torch.get_rng_state(), generators[1])
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()  # the fix it named
    assert store.load()[0] == state_at(1)


def test_damage_to_the_only_one_names_another_way_out(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    flip(tmp_path / "checkpoint" / "step-000001" / "state.json", 40)
    with pytest.raises(UserError, match="--run-dir"):
        CheckpointStore(tmp_path).load()


def test_another_format_is_refused(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path), 1)
    folder = tmp_path / "checkpoint" / "step-000001"
    body = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(body | {"format": 99}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = files.sha256((folder / "state.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="format 99"):
        CheckpointStore(tmp_path).load()


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_full_disk_keeps_the_checkpoints_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The fsync of each file, and of the folder, may be the one that fails."""
    store, real, calls = CheckpointStore(tmp_path), os.fsync, []
    save(store, 1)
    save(store, 2)

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fsync)
        with pytest.raises(UserError) as caught:
            save(store, 3)
    assert "no space" in str(caught.value) and "--resume" in str(caught.value)
    assert steps(tmp_path) == ["step-000001", "step-000002"]
    assert store.load()[0] == state_at(2)
    save(store, 3)
    assert store.load()[0] == state_at(3)


def test_a_state_that_json_cannot_hold_is_never_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    broken = state_at(2)
    broken.dials["left"] = Dials(float("nan"), 0.02)
    with pytest.raises(ValueError, match="JSON"):
        store.save(broken, {})
    assert steps(tmp_path) == ["step-000001"] and store.load()[0].step == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda body, tensors: body.pop("optimizers"),
        lambda body, tensors: body.update(optimizers=[1]),
        lambda body, tensors: body.update(python_random=[3, "x", None]),
        lambda body, tensors: body.update(python_random=None),
        lambda body, tensors: tensors.pop("random/torch"),
        lambda body, tensors: tensors.update({"random/torch": torch.zeros(3)}),
        lambda body, tensors: tensors.update({"random/numpy_keys": torch.zeros(2)}),
        lambda body, tensors: tensors.update({"random/numpy_rest": torch.zeros(1)}),
    ],
)
def test_a_stranger_s_checkpoint_whose_hashes_fit_is_one_line(tmp_path: Path, spoil: Any) -> None:
    save(CheckpointStore(tmp_path), 1)
    (folder,) = CheckpointStore(tmp_path).steps()
    body, tensors = json.loads((folder / "state.json").read_text()), load_file(folder / "tensors.safetensors")
    spoil(body, tensors)
    (folder / "state.json").write_text(json.dumps(body))
    save_file(tensors, folder / "tensors.safetensors")
    hashes = {name: files.sha256((folder / name).read_bytes()) for name in ("state.json", "tensors.safetensors")}
    (folder / "manifest.json").write_text(json.dumps(hashes))
    with pytest.raises(UserError, match="step-000001: the checkpoint is damaged") as error:
        CheckpointStore(tmp_path).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("tensors", "scalars"), [({"x/y": torch.zeros(1)}, {}), ({}, "text"), ({}, {"0": 1})])
def test_moments_that_make_no_sense_are_one_line(tmp_path: Path, tensors: Any, scalars: Any) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(UserError, match="the checkpoint is damaged"), store.understood():
        restore_state(trained()[1], tensors, scalars)
