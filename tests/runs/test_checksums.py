"""A flipped bit anywhere in a run directory is found: by its readers, by resume, and by `adapters verify RUN`."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.runs.metrics import checksummed, damaged_rows, read_rows
from teamtr_lora.runs.run_dir import RunDir

RECIPE = """
base: {source: tiny, device: cpu}
team: {agents: [{name: planner, lora: {rank: 2}}, {name: solver, lora: {rank: 4}}]}
task: {name: countdown}
rollout: {items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 2}
training: {stages: 1, inner_epochs: 1}
evaluation: {items: 2}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A finished run of the command line. Read only."""
    folder = tmp_path_factory.mktemp("checksums")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "tiny").symlink_to(tiny_base)
    assert main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")]) == 0
    return folder / "run"


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_a_line_is_one_json_object_with_its_checksum(run: RunDir) -> None:
    lines = (run.path / "metrics.jsonl").read_bytes().splitlines()
    for line in lines:
        checksum = json.loads(line)["checksum"]
        assert len(checksum) == 16 and checksummed(line.replace(f',"checksum":"{checksum}"'.encode(), b"")) == line


def test_every_flipped_bit_of_every_row_is_found(run: RunDir) -> None:
    path = run.path / "metrics.jsonl"
    good, rows = path.read_bytes(), read_rows(run.path)
    draw = random.Random(0)
    places = [(place, draw.randrange(8)) for place in range(len(good))]
    for place, bit in places:
        spoilt = bytearray(good)
        spoilt[place] ^= 1 << bit
        path.write_bytes(bytes(spoilt))
        try:
            read = read_rows(run.path)
        except UserError as error:
            assert "metrics.jsonl: line" in str(error) and "\n" not in str(error)
        else:  # the end of the last line was hit: a row that is not finished
            assert place == len(good) - 1 and read == rows[:-1]


def test_a_number_that_is_still_a_number_is_found(run: RunDir) -> None:
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"avg_at_k":0.5', b'"avg_at_k":0.7', 1))
    with pytest.raises(UserError, match=r"line 2 is damaged .*checksum"):
        read_rows(run.path)
    count, damaged = damaged_rows(run.path)
    assert count == 2 and [line for line, _ in damaged] == [2]


def test_a_row_without_its_checksum_is_refused(run: RunDir) -> None:
    path = run.path / "metrics.jsonl"
    rows = read_rows(run.path)
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    with pytest.raises(UserError, match="line 1 is damaged .*no checksum"):
        read_rows(run.path)
    assert len(damaged_rows(run.path)[1]) == len(rows)


def test_verify_a_run(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["adapters", "verify", str(copied)]) == 0
    assert "adapter versions, 4 rows and 2 checkpoints: every hash fits" in capsys.readouterr().out
    assert main(["adapters", "verify", str(copied), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


PLACES = (
    "metrics.jsonl", "team.json", "checkpoint/*/state.json", "checkpoint/*/tensors.safetensors", "checkpoint/*/manifest.json",
    "adapters/*/*/adapter_model.safetensors", "adapters/*/*/adapter_config.json", "adapters/*/*/manifest.json",
)  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_corruption_is_named(copied: Path, place: str, share: float, capsys: pytest.CaptureFixture[str]) -> None:
    file = sorted(copied.glob(place))[-1]
    data = bytearray(file.read_bytes())
    data[int(len(data) * share)] ^= 0x04
    file.write_bytes(bytes(data))
    assert main(["adapters", "verify", str(copied)]) == 2
    out = capsys.readouterr().out
    assert str(file.name if file.name == "metrics.jsonl" else file.parent) in out and "problems" in out


def test_a_missing_manifest_is_named(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sorted(copied.glob("adapters/*/*/manifest.json"))[0].unlink()
    assert main(["adapters", "verify", str(copied)]) == 2
    assert "manifest.json is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("stage", "x"),
        ("stage", None),
        ("counts", {}),
        ("counts", {"accepted": "x"}),
        ("accuracy_after", []),
        ("dials", {"planner": {"beta": 1, "radius": 0.02, "rate": "\x1b[2J"}}),
        ("dials", {"planner": {}}),
    ],
)
def test_a_forged_checkpoint_with_the_right_hash_is_one_line(
    copied: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    step = sorted((copied / "checkpoint").iterdir())[-1]
    body = json.loads((step / "state.json").read_text())
    old = body["state"][key]
    body["state"][key] = {**old, **value} if isinstance(value, dict) and value else value
    data = json.dumps(body).encode()
    (step / "state.json").write_bytes(data)
    hashes = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_text(json.dumps({**hashes, "state.json": sha256(data)}))
    for command in (["runs", str(copied.parent)], ["adapters", "verify", str(copied)], ["train", str(copied), "--resume"]):
        assert main(command) == (0 if command[0] == "runs" else 2)
        said = capsys.readouterr()
        assert "the checkpoint is damaged" in " ".join((said.out + said.err).split()) and "\x1b" not in said.out + said.err


@pytest.mark.parametrize(("key", "value"), [("avg_at_k", "x"), ("by_item", [None]), ("agents", []), ("items_digest", {})])
def test_a_forged_evaluation_with_the_right_checksum_is_one_line(
    copied: Path, key: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    row = json.loads(first)
    del row["checksum"]
    row["evaluation"][key] = value
    (copied / "metrics.jsonl").write_bytes(b"".join([checksummed(json.dumps(row).encode()) + b"\n", *rest]))
    for command in (["certify"], ["diagnose"], ["report"]):
        assert main([*command, str(copied)]) == 2
        assert "metrics.jsonl: line 1 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[]", '{"planner": 3}', "\0" * 50])
def test_a_finished_run_writes_a_damaged_team_again(copied: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    good = (copied / "team.json").read_bytes()
    (copied / "team.json").unlink()
    if text is not None:
        (copied / "team.json").write_text(text)
    assert main(["ask", str(copied), "hello"]) == 2
    assert main(["train", str(copied), "--resume"]) == 0
    assert (copied / "team.json").read_bytes() == good
    capsys.readouterr()
    assert main(["adapters", "verify", str(copied)]) == 0


def test_another_valid_team_is_replaced_too(copied: Path) -> None:
    team = json.loads((copied / "team.json").read_text())
    good = json.dumps(team)
    for entry in team.values():
        entry |= {"number": 7, "version": f"v0007-{entry['content_hash'][:12]}"}
    (copied / "team.json").write_text(json.dumps(team))
    assert main(["train", str(copied), "--resume"]) == 0
    assert json.loads((copied / "team.json").read_text()) == json.loads(good)


def test_resume_warns_of_a_damaged_row(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = copied / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"stage":0', b'"stage":8', 1))
    assert main(["train", str(copied), "--resume"]) == 0
    assert "metrics.jsonl: line 1 is damaged" in caplog.text
