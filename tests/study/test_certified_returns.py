"""The gain that a certificate is compared with is of the return that it bounds, wherever episodes end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from made_up_run import plain_rows, write_rows

from teamtr_lora.cli import main
from teamtr_lora.evaluation.returns import recorded
from teamtr_lora.rollout.playable import PlayableTeam
from teamtr_lora.tasks import Item, Task
from teamtr_lora.team import Episode

RECIPE = """
base: {{source: {base}, device: cpu}}
team:
  router: {router}
  agents: [{{name: left, lora: {{rank: 4}}}}, {{name: right, lora: {{rank: 4}}}}]
task: {{name: dataset, path: items.jsonl, reward: "mine:letters"}}
rollout: {{items_per_stage: 6, episodes_per_item: 4, max_message_tokens: 3}}
training: {{stages: 2, learning_rate: 0.01, inner_epochs: 3, order: fixed}}
trust_region: {{kind: none, delta: 0.5}}
evaluation: {{items: 4, samples_per_item: 6, every_stages: 1}}
diagnostics: {{save_episodes: none, from_updates: false}}
"""
CODE = """
def letters(prompts, completions, **columns):
    return [sum(c.isalpha() for c in text) / 3 for text in completions]

def route(messages, agents):
    return None if len(messages) == 2 else agents[len(messages)]
"""
ROUTERS = {
    "custom": '{kind: custom, rounds: 2, callable: "mine:route"}',  # at most 4 messages, and always 2
    "until_done": '{kind: until_done, rounds: 2, done_marker: "\\uFFFD"}',
    "role_play": '{kind: role_play, rounds: 2, done_marker: "\\uFFFD"}',  # what bytes that are no text become
}
GAMMA = 0.75  # 1 - 1 / 4, of the most messages


@pytest.fixture(scope="module")
def trained(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[Episode]]]]:
    """(the run, the episodes of each of its evaluations) by router; read only."""
    found: dict[str, tuple[Path, list[list[Episode]]]] = {}

    def train(router: str) -> tuple[Path, list[list[Episode]]]:
        if router not in found:
            folder = tmp_path_factory.mktemp(router)
            (folder / "items.jsonl").write_text("".join(json.dumps({"prompt": f"item {i}"}) + "\n" for i in range(60)))
            (folder / "mine.py").write_text(CODE)
            (folder / "recipe.yaml").write_text(RECIPE.format(base=tiny_base, router=ROUTERS[router]))
            played: list[list[Episode]] = []
            real = PlayableTeam.play

            def play(team: PlayableTeam, task: Task, plan: Any, progress: Any = None) -> list[Episode]:
                episodes = real(team, task, plan, progress)
                if "evaluation" in plan.purpose:
                    played.append(episodes)
                return episodes

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PlayableTeam, "play", play)
                assert main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run"), "--json"]) == 0
            found[router] = folder / "run", played
        return found[router]

    return train


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run with other rows."""

    def make(run: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
        rows = plain_rows(run)
        change(rows)
        for name in ("recipe.yaml", "team.json", "origin.json"):
            (tmp_path / name).write_bytes((run / name).read_bytes())
        write_rows(tmp_path, rows)
        return tmp_path

    return make


def certified(folder: Path, capsys: Any) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert main(["certify", str(folder), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["certify", str(folder)]) == 0
    return report, " ".join(capsys.readouterr().out.split())


def measured(episodes: list[Episode]) -> tuple[float, float]:
    """J of one evaluation and its standard error over items: one reward an episode, with its last message."""
    items: dict[str, list[float]] = {}
    for episode in episodes:
        items.setdefault(episode.item_id, []).append(GAMMA ** (len(episode.messages) - 1) * episode.reward)
    means = [fmean(own) for own in items.values()]
    return fmean(means), stdev(means) / math.sqrt(len(means))


@pytest.mark.parametrize("router", list(ROUTERS))
def test_the_gain_is_of_the_discounted_return_of_the_episodes_that_were_played(trained: Any, router: str, capsys: Any) -> None:
    run, evaluations = trained(router)
    lengths = {len(episode.messages) for episodes in evaluations for episode in episodes}
    assert lengths == {2} if router == "custom" else len(lengths) > 1, "else nothing here could differ"
    report, _ = certified(run, capsys)
    assert report["gamma"] == GAMMA and len(report["stages"]) == 2 and len(evaluations) == 3
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    slacks = []
    for place, stage in enumerate(report["stages"]):
        (before, error_before), (after, error_after) = map(measured, evaluations[place : place + 2])
        assert stage["return_improvement"] == pytest.approx(after - before, abs=1e-12)
        assert stage["return_improvement_standard_error"] == pytest.approx(math.hypot(error_before, error_after), abs=1e-12)
        own = [r["certificate"] for r in rows if r["kind"] == "update" and r["stage"] == place + 1 and r["certificate"]]
        bound = sum(t["surrogate"] - math.sqrt(2) * GAMMA * 16 * math.sqrt(t["kl"]) for t in own)
        slacks.append(after - before - bound)
        assert stage["slack"] == pytest.approx(slacks[-1], abs=1e-9)
    assert report["calibration"]["mean_slack"] == pytest.approx(fmean(slacks), abs=1e-9)
    assert report["end_discount"] == (GAMMA if router == "custom" else None)


def test_rewards_on_the_way_are_not_taken_for_rewards_at_the_end(trained: Any, changed: Any, capsys: Any) -> None:
    """Every episode has two messages, but L says that not all was earned with the second."""

    def early(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row.get("certificate"))["certificate"]["surrogate"] *= 1.1

    report, _ = certified(changed(trained("custom")[0], early), capsys)
    assert report["end_discount"] is None
    assert report["updates"] and all(update["return_improvement"] is None for update in report["updates"])


def test_returns_are_means_over_items_of_rewards_at_their_turns() -> None:
    class Given(Task):
        def items(self, split: str) -> Any: ...

    def episode(group: int, *rewards: float) -> Episode:
        return Episode(str(group), group, "", 0, item=Item(str(group), ""), rewards=list(rewards))

    episodes = [episode(0, 1.0), episode(0, 0.0, 0.0, 8.0), episode(1, 1.0, 1.0)]
    found = recorded(episodes, Given(), SimpleNamespace(episodes_per_item=1, temperature=1.0), 0.5)  # type: ignore[arg-type]
    assert found["mean_return"] == ((1 + 8 / 4) / 2 + 1.5) / 2 and found["mean_reward"] == (9 / 2 + 2) / 2
    assert found["mean_return_standard_error"] == 0


@pytest.mark.parametrize(("how", "word"), [("direct", "swap"), ("stage0", "swap"), ("undo", "undo")])
def test_the_summary_says_since_when_it_counts(trained: Any, changed: Any, capsys: Any, how: str, word: str) -> None:
    def replaced(rows: list[dict[str, Any]]) -> None:
        place = next(i for i, row in enumerate(rows) if row["kind"] == "stage" and row["stage"] == 1)
        swap = {"kind": "swap", "stage": 1, "agent": "left", "how": how, "source": "fresh", "old": "a", "new": "b"}
        swap |= dict.fromkeys(("delta_align", "kl_before", "kl_after", "evaluation_before"))
        swap |= dict.fromkeys(("steps", "sampled_tokens", "trained_tokens", "seconds", "time"), 0)
        rows.insert(place + 1, swap | {"versions": {}, "evaluation": rows[place]["evaluation"]})

    whole, printed = certified(trained("custom")[0], capsys)
    assert "bound: 2 stages with" in printed and whole["calibrated"] == "all stages"
    report, printed = certified(changed(trained("custom")[0], replaced), capsys)
    assert report["calibration"]["rows"] == 1 and report["calibrated"] == f"since the {word} after stage 1"
    assert f"bound, since the {word} after stage 1: 1 stage with a measured improvement" in printed
    assert f"by turns, since the {word} after stage 1: 1 stage with" in printed


def test_a_swap_that_no_stage_has_followed_says_so(trained: Any, changed: Any, capsys: Any) -> None:
    def replaced(rows: list[dict[str, Any]]) -> None:
        swap = {"kind": "swap", "stage": 2, "agent": "left", "how": "direct", "source": "fresh", "old": "a", "new": "b"}
        swap |= dict.fromkeys(("delta_align", "kl_before", "kl_after", "evaluation_before", "evaluation"))
        rows.append(swap | dict.fromkeys(("steps", "sampled_tokens", "trained_tokens", "seconds", "time"), 0) | {"versions": {}})

    report, printed = certified(changed(trained("custom")[0], replaced), capsys)
    assert report["calibration"] is None and "no stage since the swap after stage 2 has a measured improvement" in printed
