"""Inference-time baselines by name: their settings, and how they are put together from a run's recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.settings import known_agent
from teamtr_lora.evaluation.inference import STEP_BY_STEP, Played, Policy, SelfConsistency, Tree, TreeOfThoughts, answers_once
from teamtr_lora.recipe import AgentSection, Recipe, RouterSection, TeamSection
from teamtr_lora.registry.stored import StoredTeam
from teamtr_lora.rollout.playable import load_versions, open_team
from teamtr_lora.tasks import Task
from teamtr_lora.team import most_messages

Kind = Literal["cot", "self_consistency", "tree_of_thoughts"]
FEWEST_VOTES = 3


@dataclass(frozen=True)
class BaselineOptions:
    """What is None comes from the team's own budget: as many tokens as one of its episodes may sample."""

    kind: Kind
    agent: str | None = None  # None is the frozen base
    votes: int | None = None
    breadth: int = 3
    depth: int = 2
    beam: int = 2
    tokens: int | None = None  # most tokens sampled for one answer


def resolve_baseline(options: BaselineOptions, recipe: Recipe, task: Task) -> dict[str, Any]:
    """The baseline's settings in full; raises UserError where the task cannot be played by it."""
    if options.agent is not None:
        known_agent(options.agent, [agent.name for agent in recipe.team.agents])
    spoken = most_messages(recipe.team)
    messages = _messages(task, options.agent or "solver", spoken)
    settings: dict[str, Any] = {"kind": options.kind, "agent": options.agent, "messages": messages}
    budget = options.tokens or spoken * recipe.rollout.max_message_tokens
    if options.kind == "tree_of_thoughts":
        if not answers_once(task):
            raise UserError(f"--baseline tree_of_thoughts: {task.name} answers back; it plays tasks of one question and answer")
        tree = Tree(options.breadth, options.depth, options.beam, budget)
        if options.tokens is None:
            tree = Tree(options.breadth, options.depth, options.beam, max(budget, tree.smallest_budget()))
        tree.check()
        return {**settings, "breadth": tree.breadth, "depth": tree.depth, "beam": tree.beam, "tokens": tree.budget}
    if options.kind == "self_consistency":
        if not task.reads_answers:
            raise UserError(
                f"--baseline self_consistency: {task.name} has no single answer that could be voted on; name the function that "
                "finds it in a message (for a dataset: task.answer=FILE:FUNCTION), or override Task.answer"
            )
        votes = options.votes or max(FEWEST_VOTES, spoken // messages)
        whole = votes * messages * recipe.rollout.max_message_tokens  # every voter may speak as long as an agent of the team
        return {**settings, "votes": votes, "tokens": options.tokens or whole}
    return {**settings, "tokens": budget}


def _messages(task: Task, agent: str, spoken: int) -> int:
    """One answer where the task takes one; else as many messages as the team speaks."""
    if not answers_once(task):
        return spoken
    try:
        task.check_agents([agent], 1)
    except UserError:
        try:
            task.check_agents([agent], spoken)
        except UserError as error:
            raise UserError(f"--baseline has one agent play alone, and this task refuses that: {error}") from error
        return spoken
    return 1


@contextmanager
def open_baseline(stored: StoredTeam, settings: dict[str, Any], task: Task, purpose: str) -> Iterator[Policy]:
    """The baseline that `settings` describe, on the base of a stored team."""
    policy, recipe = settings["policy"], stored.recipe
    team = solo_team(recipe.team, policy["agent"], policy["messages"])
    with closing(open_team(recipe.base, team, recipe.rollout, seed=recipe.seed, folder=recipe.folder)) as solver:
        if version := stored.versions.get(policy["agent"]):
            load_versions(solver, {version.agent: version}, stored.adapters)
        temperature, messages = settings["temperature"], policy["messages"]
        if policy["kind"] == "tree_of_thoughts":
            tree = Tree(policy["breadth"], policy["depth"], policy["beam"], policy["tokens"])
            yield TreeOfThoughts(solver, task, tree, temperature=temperature, purpose=f"{purpose}/tree", messages=messages)
            return
        tokens = max(1, policy["tokens"] // messages // policy.get("votes", 1))
        chain = Played(solver, task, temperature=temperature, max_message_tokens=tokens, purpose=purpose)
        yield SelfConsistency(chain, policy["votes"]) if policy["kind"] == "self_consistency" else chain


def solo_team(section: TeamSection, agent: str | None, messages: int) -> TeamSection:
    """One agent that is told to think step by step; without a name, a fresh adapter, which is the base itself."""
    solver = next((a for a in section.agents if a.name == agent), AgentSection(name="solver"))
    system = "\n".join(line for line in (section.protocol.system, STEP_BY_STEP) if line)
    return TeamSection(
        agents=[solver],
        protocol=section.protocol.model_copy(update={"system": system}),
        router=RouterSection(kind="round_robin", rounds=messages),
    )
