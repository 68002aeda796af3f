"""Baselines on a scripted sampler: who is asked what, whose answer counts, and that no budget is overrun."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.base.versions import AdapterVersion
from teamtr_lora.common.errors import UserError
from teamtr_lora.evaluation.inference import JUDGEMENT_TOKENS, Played, SelfConsistency, Tree, TreeOfThoughts
from teamtr_lora.evaluation.inference_baselines import BaselineOptions, resolve_baseline, solo_team
from teamtr_lora.recipe import BaseSection, Recipe, RolloutSection, TeamSection
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.rollout.sampler import Completion, Request
from teamtr_lora.tasks import Item, Task
from teamtr_lora.tasks.benchmarks.guessing import GuessingTask
from teamtr_lora.tasks.generated.column_sum import ColumnSum
from teamtr_lora.tasks.generated.distinct import Distinct
from teamtr_lora.tasks.generated.small import SmallTask
from teamtr_lora.team import build_team

ITEMS = [Item("p", "6*7=", {"answer": "42"}), Item("q", "5*5=", {"answer": "25"})]
SECTION = TeamSection.model_validate({"agents": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "protocol": {"view": "per_agent"}})


class Scripted:
    """Says `say(prompt text, how often that prompt was seen before)`, cut at the request's limit."""

    def __init__(
        self, decode: Callable[[list[int]], str], encode: Callable[[str], list[int]], say: Callable[[str, int], str]
    ) -> None:
        self.decode, self.encode, self.say = decode, encode, say
        self.queue: dict[int, Request] = {}
        self.prompts: list[str] = []
        self.batches: list[int] = []
        self.seeds: list[int] = []

    def publish(self, version: AdapterVersion) -> None: ...

    def submit(self, request: Request) -> int:
        self.queue[len(self.prompts)] = request
        self.prompts.append(self.decode(request.prompt_ids))
        self.seeds.append(request.seed)
        return len(self.prompts) - 1

    def poll(self) -> list[Completion]:
        self.batches.append(len(self.queue))
        done = []
        for ticket, request in self.queue.items():
            text = self.say(self.prompts[ticket], self.prompts[:ticket].count(self.prompts[ticket]))
            ids = (self.encode(text) + list(request.params.stop_ids[:1]))[: request.params.max_tokens]
            done.append(Completion(ticket, ids, [0.0] * len(ids), "v0000-" + "0" * 12, "stop"))
        self.queue = {}
        return done

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def solver(tiny_base: Path) -> Callable[[Callable[[str, int], str]], tuple[PlayableTeam, Scripted]]:
    base = load_base(str(tiny_base), device="cpu")

    def make(say: Callable[[str, int], str]) -> tuple[PlayableTeam, Scripted]:
        team = build_team(solo_team(SECTION, None, 1), base.tokenizer, base_context_tokens=4096)
        sampler = Scripted(lambda ids: base.tokenizer.decode(ids), team.protocol.chat.encode, say)
        bank: Any = SimpleNamespace(version=lambda agent: AdapterVersion(agent, 0, "0" * 64))
        return PlayableTeam(base, bank, team, sampler), sampler

    return make


Make = Callable[[Callable[[str, int], str]], tuple[PlayableTeam, Scripted]]


def test_a_chain_of_thought_is_one_scored_message(solver: Make) -> None:
    playable, sampler = solver(lambda prompt, seen: "so 42")
    attempts = Played(playable, SmallTask("products"), 0.8, 32, "x").attempts(ITEMS, [7, 8], 2, None)
    assert [(a.episode.group, a.episode.success) for a in attempts] == [(7, True), (7, True), (8, False), (8, False)]
    assert all("Think step by step" in prompt for prompt in sampler.prompts) and len(set(sampler.seeds)) == 4
    assert [a.sampled_tokens for a in attempts] == [6] * 4 and attempts[0].prompt_tokens > 30
    assert sampler.batches == [4]


def test_the_majority_answers_and_every_vote_is_paid_for(solver: Make) -> None:
    script = {"6*7=": ["41", "42", "no idea", "42", "42", "17"], "5*5=": ["25", "24", "24", "-", "-", "-"]}
    playable, sampler = solver(lambda prompt, seen: script["6*7=" if "6*7=" in prompt else "5*5="][seen])
    chain = Played(playable, SmallTask("products"), 0.8, 32, "x")
    attempts = SelfConsistency(chain, 3).attempts(ITEMS, [0, 1], 2, None)
    said = [a.episode.messages[-1].text for a in attempts]
    assert said == ["41", "42", "24", "-"], "a tie goes to the first, most votes win, no vote at all is the first message"
    assert [a.episode.success for a in attempts] == [False, True, False, False]
    assert [a.sampled_tokens for a in attempts] == [3 + 3 + 8, 3 + 3 + 3, 9, 6]
    assert sampler.batches == [12]


def search(prompt: str, seen: int) -> str:
    """Steps are named s0, s1, ...; the judge likes those that end in 1; the answer is right if the best path was followed."""
    if "whole number from 1" in prompt:
        return "9" if prompt.count("s1") == 2 else "7/10" if "s1" in prompt else "none"
    if "next step" in prompt:
        return f"s{seen % 3}"
    return "42" if "1. s1\n2. s1" in prompt else "0"


def test_a_tree_follows_its_judge(solver: Make) -> None:
    playable, sampler = solver(search)
    tree = Tree(breadth=3, depth=2, beam=2, budget=600)
    policy = TreeOfThoughts(playable, SmallTask("products"), tree, 0.8, "x", 1)
    attempts = policy.attempts(ITEMS, [0, 1], 1, None)
    assert [a.episode.success for a in attempts] == [True, False], "42 is the answer to the first only"
    assert [(a.episode.group, a.episode.item) for a in attempts] == list(enumerate(ITEMS))
    assert sampler.batches == [6, 6, 12, 12, 2], "all items together: thoughts, judgements, thoughts, judgements, answers"
    asked = [prompt for prompt in sampler.prompts if "next step" in prompt]
    assert sum("1. s1" in p for p in asked) == 6 and sum("1. s0" in p for p in asked) == 6, (
        "the best state, and the first of equals"
    )
    assert attempts[0].sampled_tokens == 9 * 3 + (8 * 5 + 2) + 3, "steps, judgements, answer: all of them, ends included"
    assert len(set(sampler.seeds)) == len(sampler.seeds)


@pytest.mark.parametrize(("breadth", "depth", "beam", "budget"), [(3, 2, 2, 323), (1, 1, 1, 35), (2, 3, 5, 1000), (4, 1, 2, 999)])
def test_no_answer_costs_more_than_its_budget(solver: Make, breadth: int, depth: int, beam: int, budget: int) -> None:
    playable, _ = solver(lambda prompt, seen: "x" * 5000)
    tree = Tree(breadth, depth, beam, budget)
    tree.check()
    attempts = TreeOfThoughts(playable, SmallTask("products"), tree, 0.8, "x", 1).attempts(ITEMS[:1], [0], 1, None)
    assert budget * 0.9 - tree.thoughts * JUDGEMENT_TOKENS < attempts[0].sampled_tokens <= budget


def test_a_tree_needs_room() -> None:
    tree = Tree(3, 2, 2, 323)
    assert tree.smallest_budget() == 323
    with pytest.raises(UserError, match="--tokens 322: this tree has 9 thoughts and needs 323 tokens an answer"):
        Tree(3, 2, 2, 322).check()


def recipe(**sections: Any) -> Recipe:
    data = {"team": SECTION.model_dump(), "rollout": {"max_message_tokens": 100}, **sections}
    return Recipe.model_validate(data)


def test_equal_budgets_and_what_cannot_be_played() -> None:
    def settings(kind: Any, task: Task, **options: Any) -> dict[str, Any]:
        return resolve_baseline(BaselineOptions(kind, **options), recipe(), task)

    small = SmallTask("products")
    assert settings("cot", small) == {"kind": "cot", "agent": None, "messages": 1, "tokens": 300}
    assert settings("self_consistency", small) == {
        "kind": "self_consistency", "agent": None, "messages": 1, "votes": 3, "tokens": 300,
    }  # fmt: skip
    assert settings("self_consistency", small, votes=16, tokens=90)["tokens"] == 90
    assert (
        settings("tree_of_thoughts", small)["tokens"] == 323 and settings("tree_of_thoughts", small, tokens=900)["tokens"] == 900
    )
    assert settings("cot", ColumnSum(3))["messages"] == 3, "each column is a message, whoever speaks"
    with pytest.raises(UserError, match="speaks 3 messages an episode"):
        settings("cot", ColumnSum(4))
    with pytest.raises(UserError, match="--baseline has one agent play alone.*one agent alone has nobody to differ from"):
        settings("cot", Distinct(4))
    assert settings("cot", GuessingTask())["messages"] == 3
    with pytest.raises(UserError, match="arbench_gn answers back"):
        settings("tree_of_thoughts", GuessingTask())
    with pytest.raises(UserError, match="no single answer that could be voted on; .*task.answer=FILE:FUNCTION"):
        settings("self_consistency", Task())


def test_the_base_alone_is_the_base(tiny_base: Path) -> None:
    """The solver's fresh adapter changes no logit."""
    playable = open_team(
        BaseSection(source=str(tiny_base), device="cpu"), solo_team(SECTION, None, 1), RolloutSection(), seed=0, folder=Path(".")
    )
    plain = load_base(str(tiny_base), device="cpu").model
    ids = torch.arange(40)[None] + 5
    playable.bank.activate("solver")
    with torch.no_grad():
        assert torch.equal(playable.bank.model(ids).logits, plain(ids).logits)


def test_an_agent_of_the_team_keeps_its_role() -> None:
    section = TeamSection.model_validate({"agents": [{"name": "a", "role": "checks", "lora": {"rank": 3}}, {"name": "b"}]})
    solo = solo_team(section, "a", 2)
    assert [(a.name, a.role, a.lora.rank) for a in solo.agents] == [("a", "checks", 3)] and solo.router.rounds == 2
    assert solo_team(section, None, 1).agents[0].role == ""
