"""Whole (tiny) runs: rows, versions, a slow publish, a full disk, and going on after damage."""

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.trainer_callback import TrainerCallback

from teamtr_lora.algorithm.variants.ordering import ordering
from teamtr_lora.base.versions import AdapterVersion, read_version, write_version
from teamtr_lora.common import files
from teamtr_lora.common.errors import UserError
from teamtr_lora.rollout.sampler import Completion, Request, Sampler
from teamtr_lora.runs.metrics import TIME_FIELDS, MetricsLog, StageRow, UpdateRow, read_rows
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.tasks import Item, Task
from teamtr_lora.training.events import Events
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.run_context import RunContext
from teamtr_lora.training.stage import train

PUBLISH_SECONDS = 0.15


class Copies(Task):
    """The same item every time: what the gradient learns holds for the gate too, so updates are accepted."""

    def items(self, split: str) -> Any:
        return _Same(split)

    def score(self, episodes: Any) -> list[float]:
        return [sum(m.token_ids[0] % 4 for m in e.messages) / 6 for e in episodes]


class _Same:
    size: int | None = None

    def __init__(self, split: str) -> None:
        self._split = split

    def __getitem__(self, position: int) -> Item:
        return Item(f"{self._split}-{position}", self._split[0])


class SlowSampler(Sampler):
    """Publishing takes its time on another thread; every event is written down."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.events: list[tuple[str, str, str]] = []  # what, agent, version name
        self.live: dict[str, str] = {}

    def publish(self, version: AdapterVersion) -> None:
        self.events.append(("publishing", version.agent, version.name))

        def work() -> None:
            time.sleep(PUBLISH_SECONDS)
            self.inner.publish(version)
            self.live[version.agent] = version.name
            self.events.append(("live", version.agent, version.name))

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()

    def submit(self, request: Request) -> int:
        self.events.append(("submit", request.agent, self.live[request.agent]))
        return self.inner.submit(request)

    def poll(self) -> list[Completion]:
        return self.inner.poll()

    def close(self) -> None:
        self.inner.close()


class LaggingSampler(SlowSampler):
    """A broken engine: from the second publish of an agent on, its messages still come from the version before."""

    def publish(self, version: AdapterVersion) -> None:
        self.inner.publish(version)
        self.live.setdefault(version.agent, version.name)

    def poll(self) -> list[Completion]:
        names = {published.version.name: self.live[agent] for agent, published in self.inner._live.items()}
        return [replace(c, version=names[c.version]) for c in self.inner.poll()]


Start = Callable[..., TrainingRun]


@pytest.fixture(scope="module")
def start(make_team, config, accelerator) -> Start:
    def make(
        folder: Path, *, sampler: Any = None, callbacks: tuple[TrainerCallback, ...] = (), resume: bool = False, **values: Any
    ):
        playable = make_team()
        if sampler is not None:
            playable.sampler = sampler(playable.sampler)
            playable.publish_all()
        small = {
            "stages": 2,
            "items": 3,
            "items_per_stage": 6,
            "holdout": 0.34,
            "learning_rate": 2e-3,
            "delta": 0.1,
            "every_stages": 2,
            "temperature": 0.3,
        }
        settings = config(**(small | values))
        run_dir = RunDir(folder)
        folder.mkdir(parents=True, exist_ok=True)
        context = RunContext(
            playable=playable,
            task=Copies(),
            config=settings,
            run_dir=run_dir,
            accelerator=accelerator,
            events=Events(callbacks, settings, updates=4),
        )
        run = TrainingRun(context)
        if resume:
            run.resume()
        return run

    return make


@pytest.fixture(scope="module")
def finished(start: Start, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """An undisturbed run of two stages, with a slow publish."""
    run = start(tmp_path_factory.mktemp("run") / "whole", sampler=SlowSampler)
    train(run)
    return run


def rows_of(run: TrainingRun) -> list[UpdateRow | StageRow]:
    return read_rows(run.run_dir.path)


def without_times(run: TrainingRun) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.model_dump().items() if k not in TIME_FIELDS} for row in rows_of(run)]


def hashes(run: TrainingRun) -> dict[str, str]:
    return {agent: run.playable.bank.version(agent).content_hash for agent in run.agents}


class LendingSampler(SlowSampler):
    @contextmanager
    def training_memory(self, **asked: Any) -> Iterator[None]:
        self.events.append(("lent", str(asked["measured"]), str(asked["least"])))
        yield


def test_an_engine_hears_how_much_an_update_may_take(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors are no update: what they take says nothing of one."""
    asked = []
    monkeypatch.setattr("teamtr_lora.training.run.update_bytes", lambda *args: asked.append(args[2]) or 12345)
    run = start(tmp_path / "lent", sampler=LendingSampler, stages=1)
    train(run)
    lent = [event[1:] for event in run.playable.sampler.events if event[0] == "lent"]
    assert lent == [("False", "0")] + len(run.agents) * [("True", "12345")]
    assert asked == [run.updater.scorer.tokens_per_microbatch], "the base's shapes are built once"


def test_a_resumed_run_keeps_the_size_of_its_micro_batches(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path / "sizes", tokens_per_microbatch="auto")
    run.updater.scorer.tokens_per_microbatch = 384  # as if that was all that fitted on the day
    with closing(run):
        run.begin()
    assert start(tmp_path / "sizes", resume=True, tokens_per_microbatch="auto").updater.scorer.tokens_per_microbatch == 384


def test_a_resumed_run_keeps_the_precision_of_its_passes(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(scorer: Any, *_: Any, **__: Any) -> dict[str, float]:
        scorer.tf32 = scorer.float32_sum = True
        return {}

    monkeypatch.setattr("teamtr_lora.training.run.measure_floors", found)
    with closing(start(tmp_path / "precision")) as run:
        run.begin()
    resumed = start(tmp_path / "precision", resume=True).updater.scorer
    assert resumed.tf32 and resumed.float32_sum


def test_gain_weighted_radii_share_one_total_and_survive_a_resume(start: Start, tmp_path: Path) -> None:
    weighted = {"radii": "gain_weighted", "stages": 3}
    whole = start(tmp_path / "whole", **weighted)
    train(whole)
    by_stage = {s: {r.agent: r.delta for r in rows_of(whole) if isinstance(r, UpdateRow) and r.stage == s} for s in (1, 2, 3)}
    assert set(by_stage[1].values()) == {0.1}, "nothing has been observed yet"
    for radii in by_stage.values():
        assert sum(radii.values()) == pytest.approx(0.2) and min(radii.values()) >= 0.05
    assert any(len(set(radii.values())) == 2 for radii in by_stage.values()), "no gain was ever different"
    part = start(tmp_path / "part", **(weighted | {"stages": 1}))
    train(part)
    resumed = start(tmp_path / "part", resume=True, **weighted)
    assert {agent: dials.radius for agent, dials in resumed.updater.dials.items()} == by_stage[2]
    train(resumed)
    assert hashes(resumed) == hashes(whole)


def test_rows_are_the_documented_ones(finished: TrainingRun) -> None:
    rows = rows_of(finished)
    assert [(r.kind, r.stage) for r in rows] == [
        ("stage", 0), ("update", 1), ("update", 1), ("stage", 1), ("update", 2), ("update", 2), ("stage", 2),
    ]  # fmt: skip
    lines = (finished.run_dir.path / "metrics.jsonl").read_text().splitlines()
    for line, row in zip(lines, rows, strict=True):
        raw, model = json.loads(line), type(row)
        assert raw.pop("checksum") and set(raw) == set(model.model_fields), "every field is written, and no other"
        with pytest.raises(ValueError, match="surprise"):
            model.model_validate(raw | {"surprise": 1})
    updates = [r for r in rows if isinstance(r, UpdateRow)]
    assert {r.agent for r in updates} == {"left", "right"} and [r.update for r in updates] == [1, 2, 1, 2]
    assert any(r.decision in ("accepted", "shrunk") for r in updates)
    for row in updates:
        assert row.episodes == 24 and row.groups == 6 and (row.window_episodes > 0) is (row is not updates[0])
        assert row.messages == 24, "one of the agent's in every episode of the newest rollout"
        assert set(row.kl) == {"exact", "k1", "k3"}
        assert row.out_of_region is False
        if row.alpha is not None:
            assert row.alpha in row.alphas_tried and row.kl["exact"].bound <= row.delta
            assert row.surrogate_gain_in_sample > 0 and row.learning_rate == 2e-3 and row.probing_steps == 0
            assert (row.decision == "shrunk") == (row.alpha < 1)
        assert {"rollout", "optimize", "gate", "in_sample", "publish", "saving", "diagnostics", "transcripts"} == set(row.seconds)
        assert row.sampler_gap["max_abs"] < 1e-3
    last = rows[-1]
    assert isinstance(last, StageRow) and last.updates == 4
    assert last.accepted == sum(r.alpha is not None for r in updates)
    assert last.accepted + last.rejected + last.skipped == 4 and last.out_of_region_accepted == 0
    assert rows[0].floors is not None and set(rows[0].floors) == {"training", "gate"}  # type: ignore[union-attr]
    evaluations = [r.evaluation is not None for r in rows if isinstance(r, StageRow)]
    assert evaluations == [True, False, True], "before, not after stage 1 (every_stages: 2), and at the end"


def test_a_missing_or_infinite_field_is_no_row(finished: TrainingRun) -> None:
    good = json.loads((finished.run_dir.path / "metrics.jsonl").read_text().splitlines()[1])
    del good["checksum"]
    UpdateRow.model_validate(good)
    for change in ({"delta": float("nan")}, {"decision": "maybe"}, {"kl": {"exact": {"mean": 0.0}}}):
        with pytest.raises(ValueError, match="validation error"):
            UpdateRow.model_validate(good | change)
    good.pop("beta")
    with pytest.raises(ValueError, match="beta"):
        UpdateRow.model_validate(good)


def test_the_numbers_of_a_row_are_those_of_its_episodes(finished: TrainingRun) -> None:
    for row in rows_of(finished):
        if not isinstance(row, UpdateRow):
            continue
        name = f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        episodes = [json.loads(line) for line in (finished.run_dir.path / "episodes" / name).read_text().splitlines()]
        assert len(episodes) == row.episodes
        assert row.reward_mean == pytest.approx(sum(e["reward"] for e in episodes) / len(episodes))
        assert row.sampled_tokens == sum(m["tokens"] for e in episodes for m in e["messages"])
        assert row.truncated_messages == sum(m["finish"] == "length" for e in episodes for m in e["messages"])


def test_every_message_comes_from_the_versions_that_were_current(finished: TrainingRun) -> None:
    """With a publish that takes its time, no message of update i+1 is from the version before update i."""
    current = {"left": "", "right": ""}
    accepted = 0
    for row in rows_of(finished):
        if isinstance(row, StageRow):
            assert row.stage == 0 or row.versions == current
            current = dict(row.versions)
            continue
        assert row.team_versions == current
        name = f"stage-{row.stage:04d}-update-{row.update}-{row.agent}.jsonl"
        lines = (finished.run_dir.path / "episodes" / name).read_text().splitlines()
        messages = [m for line in lines for m in json.loads(line)["messages"]]
        assert len(messages) == 48
        assert {(m["agent"], m["version"]) for m in messages} == set(current.items())
        if row.alpha is not None:
            assert row.version != current[row.agent]
            accepted += 1
        assert row.seconds["publish"] >= (PUBLISH_SECONDS if row.alpha is not None else 0)
        current[row.agent] = row.version
    assert accepted >= 2, "the example should publish something"


def test_nothing_is_submitted_while_a_version_is_being_published(finished: TrainingRun) -> None:
    events = finished.playable.sampler.events  # type: ignore[attr-defined]
    pending: set[str] = set()
    live: dict[str, str] = {}
    for what, agent, name in events:
        if what == "publishing":
            pending.add(name)
        elif what == "live":
            pending.remove(name)
            live[agent] = name
        else:
            assert not pending and live[agent] == name
    assert live == finished.playable.versions()


def test_a_sampler_that_lags_behind_is_refused(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path / "run", sampler=LaggingSampler, stages=1)
    with pytest.raises(RuntimeError, match="superseded version"):
        for _ in range(4):
            train(run)
            run.config.training.stages += 1


def test_versions_on_disk_are_those_of_the_team(finished: TrainingRun) -> None:
    team = json.loads((finished.run_dir.path / "team.json").read_text())
    for agent in finished.agents:
        version = finished.playable.bank.version(agent)
        assert team[agent] == {"number": version.number, "content_hash": version.content_hash, "version": version.name}
        stored = read_version(finished.run_dir.adapters, version)
        assert all((stored[n] == t).all() for n, t in finished.playable.bank.tensors(agent).items())
        numbers = sorted(int(p.name[1:5]) for p in (finished.run_dir.adapters / agent).iterdir())
        assert numbers == list(range(version.number + 1)), "one folder for every version there ever was"


def test_a_checkpoint_appears_after_the_versions_that_it_names(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are written while the next update is made; a kill in between must not leave a checkpoint without its adapters."""
    missing: list[AdapterVersion] = []
    written: list[AdapterVersion] = []

    class Copying(TrainerCallback):
        def on_evaluate(self, *_: Any, **__: Any) -> None:
            """Whoever listens here finds the adapters that were evaluated."""
            versions = (run.playable.bank.version(agent) for agent in run.agents)
            missing.extend(v for v in versions if not (run.run_dir.adapters / v.agent / v.name).exists())

    run = start(tmp_path / "run", stages=1, every_stages=1, callbacks=(Copying(),))

    def slow(root: Path, version: AdapterVersion, *contents: Any) -> Path:
        checkpoints = run.run_dir.checkpoints
        named = checkpoints.state().versions if checkpoints.exists() else {}
        assert named.get(version.agent) != version
        written.append(version)
        time.sleep(0.1)
        return write_version(root, version, *contents)

    monkeypatch.setattr("teamtr_lora.training.saving.write_version", slow)
    train(run)
    assert run.run_dir.checkpoints.state().versions == {agent: run.playable.bank.version(agent) for agent in run.agents}
    assert len(written) == 2 + run.state.counts["accepted"] > 2 and not missing


def test_no_checkpoint_names_what_could_not_be_written(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's last version cannot be written, and what comes after it could: the run ends, and goes on from what is there."""
    written: list[Path] = []

    def fails_once(*args: Any) -> Path:
        written.append(Path())
        if len(written) == 4:  # the first two are of the untrained agents
            raise OSError(errno.EIO, "once")
        return write_version(*args)

    with monkeypatch.context() as patch:
        patch.setattr("teamtr_lora.training.saving.write_version", fails_once)
        run = start(tmp_path / "run", stages=1)
        with pytest.raises(OSError, match="once"):
            train(run)
        run.close()
    again = start(tmp_path / "run", stages=1, resume=True)
    assert again.state.counts["accepted"] == 1
    train(again)


def test_at_the_end_of_a_stage_its_adapters_are_there(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: list[list[str]] = []

    class Copying(TrainerCallback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            now = [run.playable.bank.version(agent) for agent in run.agents]
            missing.append([v.name for v in now if not (run.run_dir.adapters / v.agent / v.name).exists()])

    def slow(*args: Any) -> Path:
        time.sleep(0.1)
        return write_version(*args)

    run = start(tmp_path / "run", stages=1, callbacks=(Copying(),))
    monkeypatch.setattr("teamtr_lora.training.saving.write_version", slow)
    train(run)
    assert missing == [[]] and run.state.counts["accepted"] > 0


def test_a_full_disk_in_mid_run_costs_nothing_and_times_alone_differ(
    finished: TrainingRun, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in the second update; after --resume the run ends as the undisturbed one, rows and adapters alike."""
    folder, real = tmp_path / "run", os.fsync
    stopped: list[int] = []

    class Fill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **details: Any) -> None:
            if state.global_step == 1:
                patch.setattr(files.os, "fsync", full)

        def on_save(self, *_: Any, **__: Any) -> None:
            """Who listens makes the run wait for the first update's checkpoint, which a full disk would cost too."""

    def full(descriptor: int) -> None:
        stopped.append(descriptor)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        run = start(folder, callbacks=(Fill(),))
        with pytest.raises(UserError, match="no space"):
            train(run)
    assert stopped and os.fsync is real
    assert not list(folder.rglob(".tmp-*"))
    assert rows_of(run)[-1].kind == "update", "what was there before is still readable"
    again = start(folder, resume=True)
    assert again.state.counts["updates"] == 1
    train(again)
    assert hashes(again) == hashes(finished)
    assert without_times(again) == without_times(finished)
    keys = {
        k
        for a, b in zip(rows_of(again), rows_of(finished), strict=True)
        for k, v in a.model_dump().items()
        if v != b.model_dump()[k]
    }
    assert keys <= set(TIME_FIELDS) and "time" in keys


def test_a_damaged_checkpoint_stops_the_run_and_the_older_one_leads_to_the_same_end(
    finished: TrainingRun, start: Start, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished.run_dir.path, tmp_path / "run"))
    newest = sorted((folder / "checkpoint").iterdir())[-1]
    with open(newest / "tensors.safetensors", "r+b") as file:
        file.truncate(100)
    metrics = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError) as caught:
        start(folder, resume=True)
    assert str(newest) in str(caught.value) and "remove that folder" in str(caught.value)
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(newest)
    again = start(folder, resume=True)
    assert (again.state.stage, again.state.update) == (1, 2), "before the last evaluation"
    train(again)
    assert hashes(again) == hashes(finished) and without_times(again) == without_times(finished)


def test_the_end_of_a_stage_writes_no_moments_again(finished: TrainingRun) -> None:
    older, newest = sorted((finished.run_dir.path / "checkpoint").iterdir())
    moments = [path.name for path in newest.glob("moments-*")]
    assert len(moments) == 2 and all((older / name).samefile(newest / name) for name in moments)


def test_an_altered_adapter_is_noticed_on_resume(finished: TrainingRun, start: Start, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished.run_dir.path, tmp_path / "run"))
    version = finished.playable.bank.version("left")
    weights = folder / "adapters" / "left" / version.name / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(UserError, match="altered"):
        start(folder, resume=True)


def test_metrics_cut_off_after_a_kill_and_refused_when_shortened(tmp_path: Path, finished: TrainingRun) -> None:
    path = tmp_path / "metrics.jsonl"
    shutil.copy(finished.run_dir.path / "metrics.jsonl", path)
    log = MetricsLog(path)
    size = log.size
    with open(path, "ab") as file:
        file.write(b'{"kind": "upd')
    log.truncate(size)
    assert read_rows(tmp_path) == rows_of(finished)
    with pytest.raises(UserError, match="shorter"):
        log.truncate(size + 1)


def test_a_delta_below_the_floor_stops_the_run_before_training(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path / "run", delta=1e-13)
    with pytest.raises(UserError, match=r"delta = 1e-13.*floor"):
        train(run)
    assert not run.run_dir.checkpoints.exists() and run.state.counts["updates"] == 0


def test_orders() -> None:
    agents = ["a", "b", "c", "d"]
    assert ordering("fixed").arrange(agents, "0/1") == agents
    assert ordering("reverse").arrange(agents, "0/1") == agents[::-1]
    drawn = [tuple(ordering("random").arrange(agents, f"0/{stage}")) for stage in range(60)]
    assert all(sorted(order) == agents for order in drawn) and len(set(drawn)) > 12
    assert drawn == [tuple(ordering("random").arrange(agents, f"0/{stage}")) for stage in range(60)]
    assert agents == ["a", "b", "c", "d"]
