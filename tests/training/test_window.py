"""Episodes that are used again: exact weights, exact resume, and no file that outlives its use."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from teamtr_lora.algorithm.clustered import clustered_mean
from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.algorithm.variants.reuse import REUSE, HoldOut, Window, WindowAndNewest
from teamtr_lora.base.versions import read_adapter_folder
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import TeamTRConfig
from teamtr_lora.runs.checkpoint import CheckpointStore
from teamtr_lora.runs.metrics import TIME_FIELDS, UpdateRow, read_rows
from teamtr_lora.runs.rollout_store import RolloutStore
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.tasks import Task
from teamtr_lora.team import Episode
from teamtr_lora.training import update as update_module
from teamtr_lora.training.optimize import InSample
from teamtr_lora.training.run import TrainingRun
from teamtr_lora.training.scoring import Scorer
from teamtr_lora.training.stage import train
from teamtr_lora.training.stage_rollouts import StageRollouts
from teamtr_lora.training.update import AgentUpdater, part_advantages
from teamtr_lora.training.window import LARGEST_WEIGHT, SMALLEST_WEIGHT, EpisodeWindow, Material, PlayedEpisodes

Start = Callable[..., TrainingRun]
FREE = {"least_ess": 1e-6}  # nothing drops out, whatever the small examples do
HALF = {"learning_rate": 5e-3, "delta": 0.3, "inner_epochs": 1}  # steps large enough to matter


def rows_of(run: TrainingRun) -> list[dict[str, Any]]:
    rows = read_rows(run.run_dir.path)
    return [{k: v for k, v in row.model_dump().items() if k not in TIME_FIELDS} for row in rows]


def updates_of(run: TrainingRun) -> list[UpdateRow]:
    return [row for row in read_rows(run.run_dir.path) if isinstance(row, UpdateRow)]


def likelihoods(run: TrainingRun, double_logp: Any, versions: dict[str, str], episodes: Sequence[Episode]) -> np.ndarray:
    """log-probability of every episode under a team of stored versions: one message at a time, in float64."""
    total_E, temperature = np.zeros(len(episodes)), run.config.rollout.temperature
    for agent, version in versions.items():
        before = run.playable.bank.snapshot(agent)
        (folder,) = [f for f in (run.run_dir.adapters / agent).iterdir() if f.name == version]
        run.playable.bank.restore(agent, read_adapter_folder(folder)[0])
        _, logp = double_logp(run.playable, agent)
        run.playable.bank.restore(agent, before)
        for e, episode in enumerate(episodes):
            for message in (m for m in episode.messages if m.agent == agent):
                with torch.no_grad():
                    logp_N = logp(message, temperature)
                total_E[e] += float(logp_N[torch.arange(len(message.token_ids)), message.token_ids].sum())
    return total_E


class Credited(Task):
    """Every agent earns what its own message is worth, beside the team's reward."""

    def __init__(self, inner: Task) -> None:
        self._inner = inner

    def items(self, split: str) -> Any:
        return self._inner.items(split)

    def score(self, episodes: Sequence[Episode]) -> list[float]:
        return self._inner.score(episodes)

    def credit(self, episodes: Sequence[Episode]) -> Any:
        return [{m.agent: float(m.token_ids[-1] % 2) for m in e.messages} for e in episodes]


BLIND = {"router": {"kind": "blind"}, "protocol": {"view": "per_agent"}, "recombine": True}
VOTING = BLIND | {"router": {"kind": "debate", "answer": "majority"}, "own_answer_share": 0.5}
DORA = [{"rank": 2, "alpha": 4.0, "dora": True}, {"rank": 4, "alpha": 2.0, "targets": ["q_proj"]}, {"rank": 1, "alpha": 8.0}]
SETTINGS: dict[str, dict[str, Any]] = {
    "window": {"reuse": "window"},
    "the newest too": {"reuse": "window_and_newest"},
    "masked": {"reuse": "window", "truncated_messages": "mask"},
    "credited": {"reuse": "window"},
    "other adapters": {"reuse": "window", "loras": DORA},
    "few judge": {"reuse": "window", "judging_episodes": 6},
    "importance": {"resampling": "importance"},
    "as on a GPU": {"resampling": "importance"},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_weights_are_the_exact_ratio_of_the_teams(
    start: Start, tmp_path: Path, double_logp: Any, high_tokens: Task, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every third kept episode, after the last update: today's team over the team that played it, in float64 from stored
    adapters."""
    if name == "as on a GPU":  # training passes keep statistics of the head instead of hidden states
        monkeypatch.setattr(Scorer, "_takes_statistics", lambda self, _: self._training)
    task = Credited(high_tokens) if name == "credited" else high_tokens
    stages = 2 if name == "window" else 1
    run = start(tmp_path, task=task, stages=stages, **SETTINGS[name], **HALF, **FREE)
    checked: list[float] = []
    record = run.record_update

    def check(*given: Any) -> None:
        record(*given)
        for kept, played in run.rollouts.window._rollouts:
            assert {len(log_E) for log_E in played.log_ratio_E.values()} == {len(played.episodes)} and played.episodes
            if run.state.counts["updates"] < 3 * stages:
                continue
            some, now, total_E = played.episodes[::3], run.playable.versions(), np.zeros(len(played.episodes[::3]))
            for agent, version in now.items():
                after, before = (likelihoods(run, double_logp, {agent: v}, some) for v in (version, kept.versions[agent]))
                np.testing.assert_allclose(
                    played.log_ratio_E.get(agent, np.zeros(99))[::3][: len(some)], after - before, atol=1e-4
                )
                total_E += after - before
            np.testing.assert_allclose(played.episode_log_weights[::3], total_E, atol=2e-4)
            checked.extend(np.abs(total_E).tolist())

    if name == "masked":  # on the tiny base nearly every message is cut off; here some are
        play = run.roll_out

        def partly_cut(*given: Any) -> Any:
            rollout = play(*given)
            for episode in rollout.episodes:
                for message in episode.messages:
                    message.finish = "length" if (episode.seed + message.turn) % 3 == 0 else "stop"
            return rollout

        run.roll_out = partly_cut  # type: ignore[method-assign]
    run.record_update = check  # type: ignore[method-assign]
    train(run)
    assert len(checked) >= 8 and max(checked) > 0.05, "weights near 1 prove nothing"
    rows = updates_of(run)
    assert sum(row.alpha is not None for row in rows) >= 2
    if name == "masked":
        truncated = sum(m.truncated for _, p in run.rollouts.window._rollouts for e in p.episodes for m in e.messages)
        assert truncated > 0, "weights count masked messages too"
    if SETTINGS[name].get("resampling") == "importance":
        assert rows[1].importance is not None and rows[0].importance is None
    else:
        assert [row.window_episodes > 0 for row in rows] == [False, *[True] * (3 * stages - 1)]
        assert all(row.fresh_episodes == 24 for row in rows)
        assert len(run.rollouts.window.records()) == 2, "n - 1 rollouts"


def test_under_the_window_the_whole_newest_rollout_judges_and_the_earlier_ones_teach(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(tmp_path, reuse="window", **HALF, **FREE)
    seen: list[tuple[set[int], set[int], Material, Any]] = []
    split = AgentUpdater._split

    def noted(self: AgentUpdater, agent: str, material: Material, *rest: Any) -> Any:
        found = split(self, agent, material, *rest)
        fitted = {e for batch in found.fit for e in batch.episode_M.tolist()} if found else set()
        seen.append((fitted, set(found.judging.batch.episode_M.tolist()) if found else set(), material, found))
        return found

    monkeypatch.setattr(AgentUpdater, "_split", noted)
    train(run)
    first, *later = seen
    assert len(later) == 2
    assert first[0] and first[1] and not first[0] & first[1] and max(first[0] | first[1]) < 24, "the first has its own only"
    for fitted, judging, material, _ in later:
        assert judging == set(range(24)) and fitted and min(fitted) >= 24
        assert len(material.episodes) == 24 + sum(len(part.episodes) for part in material.earlier)
        groups = [e.group for e in material.episodes]
        assert max(groups[:24]) < min(groups[24:]), "groups of different rollouts are different groups"


def test_a_message_is_learned_from_with_its_weighted_advantage(
    make_team: Any, config: Any, twins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weight x advantage to learn from; to judge, the advantage itself, and a weight that every mean takes in once."""
    updater = AgentUpdater(make_team(), config(advantage="no_norm", advantage_clip=100.0, discount=1.0))
    log_weight_E = np.linspace(-0.5, 1.8, len(twins))
    material = Material(newest=PlayedEpisodes(twins, {"left": log_weight_E / 3, "right": 2 * log_weight_E / 3}))
    advantages = updater._advantages("left", material)
    split = updater._split("left", material, advantages, 0)
    assert split is not None
    weight_E = np.minimum(np.exp(log_weight_E), 4.0)
    assert weight_E.max() == 4.0 < np.exp(log_weight_E).max()
    wanted_E = np.zeros(len(twins))
    for e, episode in enumerate(twins):
        others = [i for i, o in enumerate(twins) if o.group == episode.group and i != e]
        mean = sum(weight_E[i] * twins[i].reward for i in others) / sum(weight_E[i] for i in others)
        wanted_E[e] = (1 - 1 / (len(others) + 1)) * (episode.reward - mean)
    for batch in split.fit:
        positions = batch.episode_M.tolist()
        np.testing.assert_allclose(batch.advantage_M, (weight_E * wanted_E)[positions], rtol=1e-5)
        np.testing.assert_allclose(batch.weight_M, weight_E[positions], rtol=1e-6)
    batch = split.judging.batch
    positions = batch.episode_M.tolist()
    np.testing.assert_allclose(batch.advantage_M, wanted_E[positions], rtol=1e-5)
    np.testing.assert_allclose(batch.weight_M, weight_E[positions], rtol=1e-6)  # all groups differ: every kind alike
    seen: list[list[InSample]] = []
    measure = update_module.measure_in_sample
    monkeypatch.setattr(update_module, "measure_in_sample", lambda *given, **how: seen.append(measure(*given, **how)) or seen[-1])
    outcome = updater.update("left", material, 0)
    for batch, own in zip(split.fit, seen[-1], strict=True):
        assert own.kl == pytest.approx(np.average(own.kl_M, weights=batch.weight_M), rel=1e-6)
        assert own.kl != pytest.approx(float(own.kl_M.mean()), rel=1e-3)
        assert own.kl_bound == pytest.approx(clustered_mean(own.kl_M, own.group_M, 0.95, batch.weight_M).bound, rel=1e-6)
    reading = outcome.shown
    assert reading is not None and (np.abs(wanted_E[positions]) > 0).all()
    gain_M = np.expm1(reading.log_ratio_M.double().numpy()) * wanted_E[positions]
    assert reading.gain.mean == pytest.approx(np.average(gain_M, weights=weight_E[positions]), rel=1e-3)


class Killed(BaseException):
    """As kill -9 there: nothing behind it runs."""


POINTS = [
    (RolloutStore, "write", "before"),
    (RolloutStore, "write", "after"),
    (CheckpointStore, "_write", "before"),
    (CheckpointStore, "_write", "after"),
    (RolloutStore, "keep_only", "after"),
]
RESUMED: dict[str, dict[str, Any]] = {
    "window": {"reuse": "window", "learning_rate": "auto"},
    "window_and_newest": {"reuse": "window_and_newest", "window": 3, "schedule": "linear"},
    "importance": {"resampling": "importance", "team": VOTING, "schedule": "linear"},
}


def readable_checkpoints(run: TrainingRun) -> int:
    """Every checkpoint on the disk finds every rollout that it names."""
    folders = sorted((run.run_dir.path / "checkpoint").glob("step-*"))
    for folder in folders:
        state = RunState.from_stored(json.loads((folder / "state.json").read_text())["state"])
        for record in state.rollouts:
            episodes = run.run_dir.rollouts.read(record.name, record.content_hash)
            assert all(len(log_ratios) == len(episodes) for log_ratios in record.log_ratios.values())
    return len(folders)


def stored_rollouts(run: TrainingRun) -> set[str]:
    return {path.stem for path in (run.run_dir.path / "rollouts").glob("*")}


@pytest.mark.parametrize("name", list(RESUMED))
def test_a_run_killed_around_every_write_ends_as_the_undisturbed_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    settings = {"stages": 2, **HALF, **FREE, **RESUMED[name]}
    whole = start(tmp_path / "whole", **settings)
    train(whole)
    run, kills, attempt = whole, 0, 0
    while True:
        owner, method, when = POINTS[attempt % len(POINTS)]
        real, calls, fatal = getattr(owner, method), 0, 1 if method == "write" else 2  # a checkpoint more: the run gets on

        def deadly(*given: Any, real: Any = real, when: str = when, fatal: int = fatal) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal and when == "before":
                raise Killed
            result = real(*given)
            if calls == fatal:
                raise Killed
            return result

        run = start(tmp_path / "part", resume=attempt > 0 and readable_checkpoints(run) > 0, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, deadly)
            try:
                train(run)
            except Killed:
                kills += 1
                attempt += 1
                continue
            finally:
                run.close()
        break
    assert kills >= (3 if name == "importance" else 5)
    assert rows_of(run) == rows_of(whole)
    assert run.playable.versions() == whole.playable.versions()
    assert run.rollouts.window.records() == whole.rollouts.window.records()
    assert run.updater.dials == whole.updater.dials
    assert readable_checkpoints(run) == 2 and stored_rollouts(run) == stored_rollouts(whole)
    accepted = [row for row in updates_of(run) if row.alpha is not None]
    assert len(accepted) >= 3, "an example that changes nothing proves nothing"


def test_no_rollout_outlives_its_use(start: Start, tmp_path: Path) -> None:
    run = start(tmp_path, stages=2, reuse="window", **HALF, **FREE)
    counts: list[int] = []
    checkpoint = run.checkpoint

    def counted() -> None:
        checkpoint()
        run._saver.settle()
        named = set()
        for folder in (run.run_dir.path / "checkpoint").glob("step-*"):
            named |= {r["name"] for r in json.loads((folder / "state.json").read_text())["state"]["rollouts"]}
        assert stored_rollouts(run) == named, "exactly what a checkpoint that is still there names"
        counts.append(len(named))

    run.checkpoint = counted  # type: ignore[method-assign]
    train(run)
    assert max(counts) == 3 and counts[-1] in (2, 3)


def test_rollouts_that_became_unlike_todays_team_drop_out(start: Start, tmp_path: Path) -> None:
    """With the strictest share every accepted update empties the window; where weights are equal, nothing is stale."""
    run = start(tmp_path, stages=2, reuse="window", least_ess=1.0, **HALF)
    train(run)
    rows = updates_of(run)
    for before, row in zip(rows[:-1], rows[1:], strict=True):
        assert (row.window_episodes == 0) is (before.alpha is not None)
    store: Any = SimpleNamespace(write=lambda name, episodes: name)
    window = EpisodeWindow(store, 4)
    weights = {"same": [0.7] * 4, "near": [0.1, 0.0, -0.1, 0.0], "far": [3.0, 0.0, 0.0, 0.0]}
    for name, log_weight in weights.items():
        window.add(name, {}, PlayedEpisodes([SimpleNamespace()] * 4, {"one": np.array(log_weight)}))  # type: ignore[list-item]
    for name, log_weight in weights.items():
        w = np.exp(log_weight)
        (played,) = [p for r, p in window._rollouts if r.name == name]
        assert played.effective_share == pytest.approx(w.sum() ** 2 / (w**2).sum() / 4)
    window.drop_stale(0.8)
    assert [record.name for record in window.records()] == ["same", "near"]
    window.drop_stale(0.999)
    assert [record.name for record in window.records()] == ["same"]


def test_a_window_keeps_as_many_as_it_has_room_for_the_oldest_first() -> None:
    store: Any = SimpleNamespace(write=lambda name, episodes: f"hash of {name}")
    window = EpisodeWindow(store, 2)
    for name in ("a", "b", "c"):
        window.add(name, {"one": name}, PlayedEpisodes([], {"one": np.array([0.25, -1.0])}))
    assert [(r.name, r.content_hash, r.versions, r.log_ratios) for r in window.records()] == [
        ("b", "hash of b", {"one": "b"}, {"one": [0.25, -1.0]}),
        ("c", "hash of c", {"one": "c"}, {"one": [0.25, -1.0]}),
    ]
    assert window.newest[0].name == "c"


def test_weights_are_capped_where_they_are_used_and_kept_as_they_are() -> None:
    episodes: Any = [SimpleNamespace(group=0, item_id="x", beside={})] * 3
    played = PlayedEpisodes(episodes, {"one": np.array([-9.0, 0.5, 0.0]), "two": np.array([0.0, 0.0, 9.0])})
    material = Material(newest=PlayedEpisodes(episodes), earlier=[played])
    assert material.message_log_weights("one").tolist() == [0.0, 0.0, 0.0, -9.0, 0.5, math.log(LARGEST_WEIGHT)]
    material.shift("one", np.array([1.0, 2.0, 3.0, 0.5, 0.5, -8.0]))
    whole_E = played.episode_log_weights
    assert whole_E.tolist() == [-8.5, 1.0, 1.0], "the cap is of the use: a weight that falls again is exact again"
    assert material.newest.episode_log_weights.tolist() == [1.0, 2.0, 3.0]
    least = math.log(SMALLEST_WEIGHT)
    gone = PlayedEpisodes(episodes, {"one": np.array([-800.0, -0.5, 0.0])})
    assert gone.message_and_worth_log_weights("one")[0].tolist() == [least, -0.5, 0.0], "so that no mean is over nothing"
    apart: Any = [SimpleNamespace(beside={"one": [1.0]})] * 2
    gone = PlayedEpisodes(apart, {"one": np.array([-800.0, 0.0]), "two": np.array([0.0, -900.0])})
    for log_E in gone.message_and_worth_log_weights("one"):
        assert log_E.min() == least


def test_a_recombined_message_is_weighted_by_itself_and_its_worth_by_the_others() -> None:
    """Of the third episode an agent was missing, so it was not recombined and counts as a whole."""
    episodes: Any = [SimpleNamespace(beside=beside) for beside in ({"one": [1.0], "two": [1.0]},) * 2 + ({},)]
    played = PlayedEpisodes(episodes, {"one": np.array([0.1, 9.0, 0.1]), "two": np.array([0.2, -1.0, 0.2])})
    played.log_ratio_E["three"] = np.array([0.4, 1.5, 0.4])
    most = math.log(LARGEST_WEIGHT)
    for agent, own, others in (("one", [0.1, most, 0.7], [0.6, 0.5, 0.0]), ("two", [0.2, -1.0, 0.7], [0.5, most, 0.0])):
        found = played.message_and_worth_log_weights(agent)
        assert found[0].tolist() == pytest.approx(own) and found[1].tolist() == pytest.approx(others), agent
    uneven = {"b": np.array([0.1, 1e16, 0.3]), "c": np.array([0.2, -1e16, 0.6]), "a": np.array([0.3, 1.0, 0.1])}
    orders = [PlayedEpisodes(episodes, own).episode_log_weights.tolist() for own in (uneven, dict(sorted(uneven.items())))]
    assert orders[0] == orders[1], "to the last bit: a resumed run goes on as if nothing had happened"
    fresh = PlayedEpisodes(episodes)
    assert not any(log_E.any() for log_E in fresh.message_and_worth_log_weights("one"))


@pytest.mark.parametrize(("met", "kept"), [([1.0, 0.0], True), ([0.5, 0.5], False)])
def test_a_recombined_group_is_kept_that_will_differ_when_the_others_have_weights(
    config: Any, met: list[float], kept: bool
) -> None:
    """As played all messages are worth the same; beside others of today who say the one thing rather than the other, not."""
    one = [Episode("i", 0, "p", k, rewards=[1.0], credit={"a": [0.5]}, beside={"a": met[:: 1 - 2 * k]}) for k in range(2)]
    context: Any = SimpleNamespace(config=config(), agents=["a"])
    assert StageRollouts._teaches(SimpleNamespace(_context=context), one, 1.0).tolist() == [kept] * 2  # type: ignore[arg-type]


def test_updates_of_recombined_episodes_learn_from_the_others_of_today(start: Start, tmp_path: Path) -> None:
    """Worth and weight of every message that an update learned from again, computed anew from what is stored."""
    run = start(tmp_path, reuse="window", team=BLIND, advantage="no_norm", advantage_clip=1e9, discount=0.5, **HALF, **FREE)
    train(run)
    changed = 0
    for _, played in run.rollouts.window._rollouts:
        log_weight_E, beside_E = (np.exp(log_E) for log_E in played.message_and_worth_log_weights("one"))
        assert np.allclose(log_weight_E, np.exp(played.log_ratio_E.get("one", 0.0)))
        found_E = part_advantages(played, "one", run.config.training, run.updater.discount).unclipped_E.numpy()
        for group in {episode.group for episode in played.episodes}:
            at = [e for e, episode in enumerate(played.episodes) if episode.group == group]
            # the score is a sum over messages: beside whom the agent speaks adds the same to all that it said
            rest = [sum(m.token_ids[0] % 4 for m in played.episodes[e].messages if m.agent != "one") / 9 for e in at]
            own = [sum(m.token_ids[0] % 4 for m in played.episodes[e].messages if m.agent == "one") / 9 for e in at]
            worth = 0.25 * np.array([np.mean([beside_E[j] * (o + r) for j, r in zip(at, rest, strict=True)]) for o in own])
            for place, e in enumerate(at):
                others = [i for i in range(len(at)) if i != place]
                mean = np.average(worth[others], weights=log_weight_E[at][others])
                assert found_E[e] == pytest.approx((1 - 1 / len(at)) * (worth[place] - mean), abs=1e-6)
                changed += abs(beside_E[e] - 1) > 0.01
    assert changed >= 4


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after two updates. Read only."""
    folder = tmp_path_factory.mktemp("stopped")
    train(start(folder, reuse="window", stop_after=2, **HALF, **FREE))
    return folder


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "damaged"),
        (lambda path: path.write_text(path.read_text().replace('"seed":', '"seed":1')), "damaged"),
        (lambda path: (path.unlink(), path.mkdir()), ""),
    ],
    ids=["missing", "cut", "altered", "a folder"],
)
def test_a_rollout_that_is_not_what_was_written_stops_the_resume_in_one_line(
    start: Start, stopped: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = sorted((run / "rollouts").glob("*.json"))[-1]
    spoil(path)
    with pytest.raises(UserError) as caught:
        start(run, resume=True, reuse="window", **HALF, **FREE)
    line = str(caught.value)
    assert path.name in line and words in line and "\n" not in line


@pytest.mark.parametrize("content", ["[1]", "{}", '[{"item_id": 3}]', "[[", ""])
def test_a_file_of_something_else_is_no_rollout(tmp_path: Path, content: str) -> None:
    from teamtr_lora.common.files import sha256

    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError) as caught:
        RolloutStore(tmp_path).read("x", sha256(content.encode()))
    assert "x.json" in str(caught.value) and "no episodes" in str(caught.value) and "\n" not in str(caught.value)


def test_stored_episodes_are_the_same_episodes(tmp_path: Path, episodes: list[Episode]) -> None:
    for episode in episodes:
        episode.item, episode.credit = object(), {"left": [0.1 + 0.2, 1e-300]}
        episode.messages[0].text = "\u00e9\u2028\U0001f600\x00"
    store = RolloutStore(tmp_path / "rollouts")
    digest = store.write("a", episodes)
    back = store.read("a", digest)
    for old, new in zip(episodes, back, strict=True):
        old.item = None
        assert old == new
    store.write("b", episodes)
    store.keep_only({"b", "c"})
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["b.json"]


def played(groups: int, items: int | None = None) -> Any:
    return [SimpleNamespace(item_id=str(g % (items or groups)), group=g) for g in range(groups) for _ in range(3)]


def test_how_each_way_of_reuse_divides_the_newest_rollout() -> None:
    settings, newest = SimpleNamespace(holdout=0.25), played(8)
    whole = Window(settings).divide(newest, {1, 2}, True, 0)
    assert (whole.fit, whole.judge) == ([], list(range(8)))
    alone = HoldOut(settings).divide(newest, {1, 2, 5}, False, 0)
    assert Window(settings).divide(newest, {1, 2, 5}, False, 0) == alone, "nothing earlier: as without a window"
    assert WindowAndNewest(settings).divide(newest, {1, 2, 5}, True, 0) == alone
    assert WindowAndNewest(settings).divide(newest, {3}, True, 0) == whole, "the only group that differs judges"
    assert 3 in WindowAndNewest(settings).divide(newest, {3}, False, 0).fit, "and teaches where there is nothing else"
    assert {name: kind(settings).window(4) for name, kind in REUSE.items()} == {"none": 0, "window": 3, "window_and_newest": 3}
    assert {name: kind(settings, 7).window(4) for name, kind in REUSE.items()} == {"none": 0, "window": 7, "window_and_newest": 7}
    two = [Window(settings, rollouts, two_stages=True).window(agents) for rollouts, agents in ((None, 4), (7, 4), (None, 1))]
    assert two == [8, 7, 0]
    for matched, delta, rollouts in (("update", 0.01, 3), ("stage", 0.05, 8), ("stage", 0.051, 3)):
        config = TeamTRConfig(training={"matched": matched}, trust_region={"delta": delta})
        assert Variants.of(config).reuse.window(4) == rollouts, "small rollouts of small steps: two stages of them"


def test_what_has_no_gradient_is_held_out_first() -> None:
    """8 of 16 items judge. The more of them do not differ in return, the more of the others teach."""
    newest = played(16)
    for mixed, held in ((16, 8), (12, 4), (8, 2), (3, 2), (2, 1)):
        for seed in range(5):
            division = HoldOut(SimpleNamespace(holdout=0.5)).divide(newest, set(range(mixed)), False, seed)
            assert sum(group < mixed for group in division.judge) == held
            assert len(division.judge) == 8 and sorted(division.judge + division.fit) == list(range(16))
    twice = played(8, items=4)  # every item twice: both groups on one side, also where only one of them differs
    division = HoldOut(SimpleNamespace(holdout=0.5)).divide(twice, {0, 1, 6}, False, 0)
    assert {g % 4 for g in division.judge} & {g % 4 for g in division.fit} == set()
