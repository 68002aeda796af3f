"""One agent in place of a team: the recipe it trains by, and the team's budget that it is given."""

from __future__ import annotations

from teamtr_lora.common.settings import known_agent
from teamtr_lora.recipe import AgentSection, Recipe
from teamtr_lora.team import most_messages


def budget(recipe: Recipe) -> dict[str, int]:
    """What a recipe's training samples, at most (a message may end early, an episode too)."""
    rollout, messages = recipe.rollout, most_messages(recipe.team)
    per_stage, items = recipe.stage_budget()
    rollouts, episodes = recipe.training.stages * per_stage, items * rollout.episodes_per_item
    return {
        "rollouts": rollouts,
        "episodes_per_rollout": episodes,
        "messages_per_episode": messages,
        "tokens_per_message": rollout.max_message_tokens,
        "episodes": rollouts * episodes,
        "tokens": rollouts * episodes * messages * rollout.max_message_tokens,
    }


def single_agent_recipe(recipe: Recipe, name: str | None = None) -> Recipe:
    """The recipe with one agent that does all the jobs and has all the team's rollouts, episodes and messages.

    Every rollout of the team becomes a stage of one update. The agent has the adapter of `name` (of the first agent without
    it), the jobs of all, and speaks as often as the team does.
    """
    agents = recipe.team.agents
    rollouts, items = recipe.stage_budget()
    names = [agent.name for agent in agents]
    chosen = agents[0 if name is None else names.index(known_agent(name, names))]
    jobs = "; ".join(dict.fromkeys(agent.role for agent in agents if agent.role))
    kind = recipe.team.router.kind
    data = recipe.model_dump()
    data["team"]["agents"] = [AgentSection(name=chosen.name, role=jobs, lora=chosen.lora).model_dump()]
    data["team"]["recombine"] = False  # there is nobody else
    data["team"]["router"] = {
        "kind": kind if kind == "until_done" else "round_robin",
        "rounds": most_messages(recipe.team),
        "done_marker": recipe.team.router.done_marker,
    }
    data["rollout"]["items_per_stage"] = items
    data["training"].update(
        stages=recipe.training.stages * rollouts, order="fixed", resampling="every_update", matched="update", update="sequential"
    )
    data["evaluation"]["every_stages"] = recipe.evaluation.every_stages * rollouts
    return Recipe.model_validate(data).placed_in(recipe.folder)
