"""The budget of a single agent that stands in for a team, and what each algorithm is as settings. Nothing here needs TRL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.baselines.algorithms import batch_settings, group_settings
from teamtr_lora.baselines.bridge import prompt_keys, reward, trl_columns
from teamtr_lora.baselines.single import budget, single_agent_recipe
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.team import Episode, Message, TeamProtocol

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


SIZES = ("rollout.items_per_stage=32", "rollout.episodes_per_item=8", "training.minibatches_per_epoch=1")


def quickstart(*overrides: str) -> Recipe:
    return load_recipe(RECIPES / "quickstart.yaml", [*SIZES, *overrides])


def test_the_budget_is_stages_times_agents_times_items_times_episodes() -> None:
    found = budget(quickstart())
    assert (found["rollouts"], found["episodes"]) == (8 * 3, 8 * 3 * 32 * 8)
    assert found["tokens"] == 8 * 3 * 32 * 8 * 3 * 12


@pytest.mark.parametrize(
    "change",
    [
        [],
        ["training.resampling=never"],
        ["training.resampling=every_k", "training.resample_every=2"],
        ["training.resampling=never", "training.update=joint"],
        ["training.matched=stage", "rollout.items_per_stage=48"],
        ["training.order=[checker, planner, solver]"],
        ["team.router={kind: sequence, sequence: [planner, checker], rounds: 4}"],
        ["team.router={kind: until_done, rounds: 2, done_marker: STOP}"],
        ["team.router={kind: debate, rounds: 2, judge: checker}", "team.protocol.view=per_agent", "task.digits=1"],
        ["team.router={kind: custom, rounds: 2, callable: 'mine:router'}"],
        ["team.router.kind=blind", "team.protocol.view=per_agent", "team.recombine=true"],
        ["evaluation.every_stages=0"],
    ],
)
def test_one_agent_gets_all_of_the_teams_budget(change: list[str]) -> None:
    team = quickstart(*change)
    single = single_agent_recipe(team)
    assert budget(single) == budget(team)
    assert len(single.team.agents) == 1 and single.training.stages == budget(team)["rollouts"]
    assert Recipe.model_validate(single.model_dump()) == single, "it is a recipe that eval and the rest can read"
    assert single.folder == team.folder
    every = single.evaluation.every_stages
    assert every * team.training.stages == team.evaluation.every_stages * single.training.stages, "evaluated at the same points"
    for key in ("base", "task", "seed", "trust_region"):
        assert getattr(single, key) == getattr(team, key)


def test_the_chosen_agents_adapter_and_everybodys_roles() -> None:
    team = quickstart("team.agents.solver.lora.rank=3", "team.agents.solver.lora.targets=[q_proj]")
    (agent,) = single_agent_recipe(team, "solver").team.agents
    assert (agent.name, agent.role) == ("solver", "ones; tens; hundreds")
    assert agent.lora == team.team.agents[1].lora
    assert single_agent_recipe(team).team.agents[0].lora == team.team.agents[0].lora
    with pytest.raises(UserError, match=r"--agent nobody: the team has no such agent; it has planner, solver, checker"):
        single_agent_recipe(team, "nobody")


def test_a_role_that_all_share_is_said_once() -> None:
    team = quickstart("team.agents=[{name: a, role: adds}, {name: b, role: adds}, {name: c}]")
    assert single_agent_recipe(team).team.agents[0].role == "adds"


def test_what_makes_the_algorithms() -> None:
    recipe = quickstart("training.clip_ratio=0.15", "training.inner_epochs=1", "rollout.temperature=0.7")
    grpo, dapo, ppo = (group_settings(name, recipe) for name in ("grpo", "dapo", "ppo"))  # type: ignore[arg-type]
    for settings in (grpo, dapo, ppo):
        assert settings["beta"] == 0 and settings["epsilon"] == 0.15 and settings["temperature"] == 0.7
        assert settings["num_generations"] == 8 and settings["learning_rate"] == recipe.training.starting_rate
        assert settings["lr_scheduler_type"] == "constant"
    falling = quickstart("training.learning_rate=1e-3", "training.schedule=linear")
    assert group_settings("grpo", falling)["lr_scheduler_type"] == "linear"
    assert grpo["loss_type"] == "grpo" and grpo["scale_rewards"] == "group" and "epsilon_high" not in grpo
    assert dapo["loss_type"] == "dapo" and dapo["epsilon_high"] == 0.23 and dapo["mask_truncated_completions"]
    assert ppo["scale_rewards"] == "batch" and (grpo["num_iterations"], ppo["num_iterations"]) == (1, 2)


@pytest.mark.parametrize("tokens", [1, 100, 999, 8192, 10**6])
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_a_rollout_is_cut_into_equal_steps_and_passes_that_fit(tokens: int, parts: int) -> None:
    recipe = quickstart(f"training.tokens_per_microbatch={tokens}", f"training.minibatches_per_epoch={parts}")
    made = batch_settings(recipe, longest=50, iterations=3)
    episodes, size = 32 * 8, made["per_device_train_batch_size"]
    assert size * made["gradient_accumulation_steps"] * parts == episodes
    assert size * made["steps_per_generation"] == episodes
    assert size == 1 or size * 50 <= tokens
    assert made["max_steps"] == 8 * 3 * parts and made["save_steps"] == 3 * parts


def test_steps_of_unequal_size_are_refused() -> None:
    with pytest.raises(UserError, match=r"training\.minibatches_per_epoch = 3.*256 episodes"):
        batch_settings(quickstart("training.minibatches_per_epoch=3"), longest=50, iterations=1)


def spoken(protocol: TeamProtocol, texts: list[str], finish: Any = "stop") -> Episode:
    transcript, episode = protocol.begin("the question"), Episode("item", 0, "the question", 0, rewards=[0.0, 0.75])
    for turn, text in enumerate(texts):
        prompt, tokens = transcript.prompt_for("a"), protocol.chat.encode(text) + protocol.end_ids[:1]
        transcript.add_message("a", tokens)
        logps = [-1.0 - turn - i / 100 for i in range(len(tokens))]
        episode.messages.append(Message("a", turn, prompt, tokens, logps, "", finish, text))
        transcript.add_feedback(f"told {turn}")
    return episode


def test_an_episode_is_handed_over_token_for_token(byte_tokenizer: Any) -> None:
    protocol = TeamProtocol(byte_tokenizer, {"a": ""})
    episode = spoken(protocol, ["first", "second words"])
    columns = trl_columns([episode], "a", mask_truncated=False)
    prompt, completion, mask, logprobs = (columns[k][0] for k in ("prompt_ids", "completion_ids", "env_mask", "logprobs"))
    first, second = episode.messages
    assert prompt == first.prompt_ids
    assert prompt + completion == second.prompt_ids + second.token_ids, "nothing is rendered again"
    own = [token for token, counted in zip(completion, mask, strict=True) if counted]
    assert own == first.token_ids + second.token_ids
    assert [p for p, counted in zip(logprobs, mask, strict=True) if counted] == first.sampler_logprobs + second.sampler_logprobs
    told = protocol.raw_text([token for token, counted in zip(completion, mask, strict=True) if not counted])
    assert "told 0" in told and "told 1" not in told and not re.search("first|second", told)
    assert reward(["0:0"], [""], episode_reward=columns["episode_reward"]) == [0.75]


def test_messages_that_were_cut_off_are_masked_where_the_recipe_says_so(byte_tokenizer: Any) -> None:
    protocol = TeamProtocol(byte_tokenizer, {"a": ""})
    episode = spoken(protocol, ["first", "second"])
    episode.messages[0].finish = "length"
    masked = trl_columns([episode], "a", mask_truncated=True)["env_mask"][0]
    scored = trl_columns([episode], "a", mask_truncated=False)["env_mask"][0]
    assert sum(scored) - sum(masked) == len(episode.messages[0].token_ids)


def test_an_episode_that_is_no_single_sequence_is_refused_with_the_fix(byte_tokenizer: Any) -> None:
    protocol = TeamProtocol(byte_tokenizer, {"a": ""}, reasoning_tags="strip")
    episode = spoken(protocol, ["<think>hidden</think>7", "8"])
    with pytest.raises(UserError, match=r"item 'item'.*team\.protocol\.reasoning_tags=keep"):
        trl_columns([episode], "a", mask_truncated=False)
    kept = spoken(TeamProtocol(byte_tokenizer, {"a": ""}, reasoning_tags="keep"), ["<think>hidden</think>7", "8"])
    assert len(trl_columns([kept], "a", mask_truncated=False)["prompt_ids"]) == 1


def test_keys_name_the_stage_and_the_item() -> None:
    assert prompt_keys(3, 2) == ["3:0", "3:1"]
