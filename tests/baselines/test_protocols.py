"""The team-level baselines on the embedded base: each does what its name says, in training and in evaluation."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.commands import opened
from teamtr_lora.evaluation.evaluate import plan_in_training, summarise
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.registry.stored import find_team
from teamtr_lora.rollout.collector import PlayPlan
from teamtr_lora.study.plan import make_plan
from teamtr_lora.tasks import Task
from teamtr_lora.tasks.benchmarks.guessing import GuessingTask
from teamtr_lora.team import Episode, build_router
from teamtr_lora.training.trainer import TeamTRTrainer

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SMALL = ["rollout.items_per_stage=4", "rollout.episodes_per_item=2", "trust_region.holdout=0.5", "training.stages=1",
         "training.inner_epochs=1", "evaluation.items=4", "diagnostics.save_episodes=all"]  # fmt: skip


def small(name: str, *more: str) -> Recipe:
    return load_recipe(RECIPES / "baselines" / f"{name}.yaml", [*SMALL, *more])


def total(text: str) -> str | None:
    """What a message of the sum states, read here independently of the task."""
    found = re.findall(r"=\s*([0-9]+)", text)
    return str(int(found[-1])) if found else None


def right(prompt: str) -> str:
    first, second = prompt.split("+")
    return str(int(first) + int(second))


def majority(answers: list[str | None]) -> str | None:
    """By counting pairs: an answer that none beats, of those the first."""
    held = [a for a in answers if a is not None]
    best = [a for a in held if all(held.count(a) >= held.count(b) for b in held)]
    return best[0] if best else None


def play(recipe: Recipe, items: int = 8) -> tuple[list[Episode], Any]:
    trainer = TeamTRTrainer.from_recipe(recipe)
    playable = trainer.open()
    chosen = [trainer.task.items("test")[i] for i in range(items)]
    return playable.play(trainer.task, PlayPlan(chosen, 2, 1.0, 12, "test")), playable.team.protocol


@pytest.fixture(scope="module")
def debated() -> tuple[list[Episode], Any]:
    return play(small("debate"))


def test_the_majority_really_decides(debated: tuple[list[Episode], Any]) -> None:
    overruled = 0
    for episode in debated[0]:
        last = [total(m.text) for m in episode.messages[-3:]]
        assert episode.answer_turn is not None and episode.answer_turn >= 3
        assert total(episode.messages[episode.answer_turn].text) == majority(last)
        assert episode.reward == float(majority(last) == right(episode.prompt))
        overruled += majority(last) != last[-1]
    assert overruled, "in no episode did the majority differ from the last word: the test would not see the difference"
    assert any(episode.reward for episode in debated[0])


def test_in_the_first_round_nobody_sees_the_others(debated: tuple[list[Episode], Any]) -> None:
    episodes, protocol = debated
    for episode in episodes:
        for message in episode.messages[:3]:
            shown = protocol.raw_text(message.prompt_ids)
            assert shown.count("<|im_start|>") == 3 and "=" not in shown, "system, question, and its own turn to come"
        for message in episode.messages[3:]:
            shown = protocol.raw_text(message.prompt_ids)
            for before in episode.messages[:3]:
                assert (f"{before.agent}:\n{before.text}" in shown) == (before.agent != message.agent)
            seen = Counter(re.findall(r"(\w+):\n", shown))
            assert all(seen[m.agent] == (m.agent != message.agent) for m in episode.messages[:3])


def test_the_judge_reads_the_whole_debate_and_its_message_is_the_answer() -> None:
    episodes, protocol = play(small("debate_judge"))
    differs = 0
    for episode in episodes:
        assert [m.agent for m in episode.messages] == ["planner", "solver", "planner", "solver", "checker"]
        assert episode.answer_turn == 4
        judged = total(episode.messages[4].text)
        assert episode.reward == float(judged == right(episode.prompt))
        differs += judged != majority([total(m.text) for m in episode.messages[2:4]])
        shown = protocol.raw_text(episode.messages[4].prompt_ids)
        assert all(f"{m.agent}:\n{m.text}" in shown for m in episode.messages[:4])
        assert "=" not in protocol.raw_text(episode.messages[1].prompt_ids)
    assert differs


def test_a_role_play_ends_with_the_marker_and_the_assistant_answers() -> None:
    episodes, _ = play(small("role_play", 'team.router.done_marker="1"'), items=10)
    lengths = set()
    for episode in episodes:
        texts = [m.text for m in episode.messages]
        assert [m.agent for m in episode.messages] == [("planner", "solver")[i % 2] for i in range(len(texts))]
        over = [i for i in range(2, len(texts), 2) if "1" in texts[i]]
        assert len(texts) == (over[0] + 1 if over else 6)
        answer = [text for i, text in enumerate(texts) if i % 2][-1]
        assert episode.reward == float(total(answer) == right(episode.prompt))
        lengths.add(len(texts))
    assert {3, 6} <= lengths, "both ways of ending are seen"


@pytest.mark.parametrize("name", ["debate", "debate_judge", "role_play", "single_per_agent"])
def test_trains_and_evaluates(name: str, tmp_path: Path) -> None:
    rounds = [] if name == "single_per_agent" else ["team.router.rounds=1"]
    recipe = small(name, f"output_dir={tmp_path / 'run'}", *rounds)
    summary = TeamTRTrainer.from_recipe(recipe).train()
    agents = [agent.name for agent in recipe.team.agents]
    assert summary.updates == len(agents) and set(summary.adapters) == set(agents)
    for path in (tmp_path / "run" / "episodes").iterdir():
        for line in path.read_text().splitlines():
            episode = json.loads(line)
            if name != "single_per_agent":
                stated = total(episode["messages"][episode["answer_turn"]]["text"])
                assert episode["reward"] == float(stated == right(episode["prompt"])), "training sees the team's answer"
    with opened(find_team(tmp_path / "run")) as (stored, playable):
        task = stored.task.build(stored.folder)
        plan = plan_in_training(task, stored, 4, k=1)
        again = summarise(playable.play(task, plan), task, plan)
    assert again.avg_at_k == summary.accuracy_after and again.episodes == 4


def test_budgets_of_the_single_agents_against_the_team() -> None:
    team, total_, own = (
        make_plan(load_recipe(RECIPES / name))
        for name in ("quickstart.yaml", "baselines/single_total.yaml", "baselines/single_per_agent.yaml")
    )

    def episodes(plan: Any) -> int:
        return int(plan.stages * plan.episodes_per_stage)

    def tokens(plan: Any) -> int:
        return int(plan.stages * plan.sampled_tokens_per_stage_at_most)

    assert episodes(total_) == episodes(team) and tokens(total_) == tokens(team)
    assert total_.stages * total_.updates_per_stage == team.stages * team.updates_per_stage
    assert 3 * episodes(own) == episodes(team) and 3 * tokens(own) == tokens(team)
    assert own.stages * own.updates_per_stage == team.stages, "as many updates as each of the team's agents has"


def test_a_task_without_one_answer_is_refused_before_anything_is_played() -> None:
    with pytest.raises(UserError, match=r"team\.router\.kind: one message is the answer.*column_sum.*task\.digits=1"):
        make_plan(small("debate", "task.digits=2"))
    with pytest.raises(UserError, match=r"team\.router\.kind"):
        GuessingTask().check_router(build_router("role_play", ["a", "b"]))
    with pytest.raises(UserError, match=r"nothing to vote over; name a team\.router\.judge"):
        Task().check_router(build_router("debate", ["a", "b"]))
    with pytest.raises(UserError, match=r"team\.router\.answer = 'majority'.*nothing to vote over; leave it out"):
        Task().check_router(build_router("round_robin", ["a", "b"], answer="majority"))
    with pytest.raises(UserError, match=r"team\.router\.answer = 'majority': it makes one message the answer.*leave it out"):
        GuessingTask().check_router(build_router("round_robin", ["a", "b"], answer="majority"))
    Task().check_router(build_router("debate", ["a", "b", "c"], judge="c"))
