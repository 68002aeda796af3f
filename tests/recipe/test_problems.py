"""Bad recipes are explained to a person, all mistakes at once."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RecipeError, TeamTRConfig, load_recipe, problems, recipe_schema
from teamtr_lora.tasks.machinery.order import DataOrder

AGENTS = [{"name": "planner"}, {"name": "solver"}]
SPLIT: dict[str, Any] = {"tensor_parallel": 2}


def lines(**sections: Any) -> list[str]:
    return [str(problem) for problem in problems({"team": {"agents": AGENTS}, **sections})]


def dataset(**keys: Any) -> dict[str, Any]:
    return {"name": "dataset", "path": "a.jsonl", "reward": "rewards:f", **keys}


ONE_PROBLEM: list[tuple[dict[str, Any], str]] = [
    ({"trust_region": {"delta": -0.1}}, "trust_region.delta = -0.1: must be greater than 0; try 0.01 (the paper's radius)"),
    ({"trust_region": {"delta": 0}}, "trust_region.delta = 0: must be greater than 0"),
    ({"trust_region": {"delta": float("nan")}}, "must be finite"),
    ({"training": {"stages": -3}}, "training.stages = -3: must be at least 1; the default is 8"),
    ({"training": {"stages": "8"}}, "training.stages = '8': must be a whole number, at least 1; the default is 8"),
    ({"training": {"clip_ratio": 1}}, "must be greater than 0 and less than 1; the default is 0.2"),
    ({"training": {"discount": "autoo"}}, "must be auto or a number, at least 0 and at most 1"),
    ({"training": {"order": "randm"}}, "must be one of random, fixed, reverse or a list"),
    ({"training": {"learning_rat": 1}}, "training.learning_rat = 1: unknown key; did you mean 'learning_rate'?"),
    ({"rollout": {"learning_rate": 1}}, "unknown key; did you mean 'training.learning_rate'?"),
    ({"lerning_rate": 1}, "lerning_rate = 1: unknown key; did you mean 'training.learning_rate'?"),
    ({"training": {"data_use": 1}}, "training.data_use = 1: unknown key; the keys of training are stages"),  # no guess from afar
    ({"num_generations": 8}, "num_generations = 8: unknown key; did you mean 'rollout.episodes_per_item'?"),
    ({"rolout": {}}, "rolout: unknown key; did you mean 'rollout'?"),
    ({"rollout": {"zzzz": 1}}, "unknown key; the keys of rollout are engine, items_per_stage"),
    ({"rollout": {"episodes_per_item": 1}}, "must be at least 2"),
    ({"rollout": {"top_p": 0.9}}, "rollout.top_p = 0.9: truncation changes the policy under the ratio: training uses the full"),
    ({"rollout": {"top_k": 5}}, "rollout.top_k = 5: truncation changes the policy under the ratio"),
    ({"rollout": {"importance_cap": 0.5}}, "rollout.importance_cap = 0.5: must be at least 1; the default is null"),
    ({"rollout": {"items_per_stage": 4}}, "rollout.items_per_stage = 4 with trust_region.holdout = 0.25 holds out 1 of 4"),
    ({"rollout": {"items_per_stage": 2}, "trust_region": {"holdout": 0.9}}, "nothing is left for the gradient"),
    (
        {"training": {"shard": "always"}},
        "training.shard = 'always': rollout.engine is transformers, and a base that is split cannot",
    ),
    ({"training": {"shard": "always"}, "rollout": {"engine": "vllm"}}, "set rollout.vllm.tensor_parallel to 2 or more"),
    (
        {"training": {"shard": "always"}, "base": {"quantization": "4bit"}, "rollout": {"engine": "vllm", "vllm": SPLIT}},
        "training.shard = 'always': base.quantization is 4bit, and a quantised base cannot be split",
    ),
    (
        {"rollout": {"engine": "vllm", "vllm": SPLIT | {"patches": ["lora_layers"]}}},
        "patches change vLLM in this process, and tensor_parallel = 2 has its workers in others; use auto or none",
    ),
    ({"rollout": {"vllm": {"tensor_parallel": 0}}}, "must be at least 1"),
    ({"training": {"shard": "yes"}}, "must be one of auto, never, always"),
    ({"fsdp": True}, "the frozen base is all that is split; did you mean 'training.shard'?"),
    ({"base": {"device": "gpu"}}, "base.device = 'gpu': must be auto, cpu, cuda or cuda:N; the default is auto"),
    ({"base": {"precision": "bf61"}}, "did you mean 'bf16'?"),
    ({"tracking": {"trackers": ["wand"]}}, "tracking.trackers.0 = 'wand': must be one of tensorboard, wandb, trackio"),
    ({"diagnostics": {"save_episodes": -1}}, "must be one of all, none or a whole number, at least 0"),
    ({"evaluation": None}, "evaluation = null: must be a section (a mapping of keys); leave the section out"),
    ({"task": {"name": "colum_sum"}}, "did you mean 'column_sum'?"),
    ({"task": {"digits": 9}}, "task.digits = 9: must be at least 1 and at most 8; the default is 3"),
    ({"task": {"reward": "m:f"}}, "task.reward = 'm:f': unknown key; it belongs to another task; check task.name"),
    ({"task": "column_sum"}, "task = 'column_sum': must be a section"),
    ({"task": {"reward_range": [1, 0]}}, "the lowest reward must be below the highest"),
    ({"task": dataset(path="a.txt")}, "must be a file that ends in .jsonl, .json, .jsonl.gz, .json.gz, .csv or .parquet"),
    ({"task": dataset(path=None)}, "a dataset task needs items; give path (a local file) or hub (a hub id)"),
    ({"task": dataset(hub="x/y")}, "task.hub = 'x/y': path is given too"),
    ({"task": dataset(reward="f")}, "must be a Python callable written module:function, or a list of such"),
    ({"task": dataset(reward=[])}, "task.reward: a dataset task needs a reward function"),
    ({"task": {"name": "dataset", "hub": "x/y"}}, "task.reward: a dataset task needs a reward function"),
    ({"team": {}}, "team.agents: the team has no agents; add at least one {name, role}"),
    ({"team": {"agents": []}}, "team.agents: the team has no agents; add at least one {name, role}"),
    ({"team": None}, "team: the recipe has no team; add team:"),
    ({"team": {"agents": {"planner": {}}}}, 'write a list of {"name": ..., "role": ...}'),
    ({"team": {"agents": ["planner"]}}, "team.agents.0 = 'planner': must be a section (a mapping of keys); write {\"name\": "),
    ({"team": {"agents": [{"role": "x"}]}}, "team.agents.0.name: the agent has no name; add one, for example name: planner"),
    ({"team": {"agents": [{"name": "a"}, {"name": "a"}]}}, "team.agents.1.name = 'a': team.agents.0 has the same name"),
    ({"team": {"agents": AGENTS, "router": {"kind": "custom"}}}, "team.router.callable: is not given"),
    (
        {"rollout": {"server": {"api_key_variable": "AWS_SECRET_ACCESS_KEY"}}},
        "rollout.server.api_key_variable = 'AWS_SECRET_ACCESS_KEY': must be the name of an environment variable that ends in",
    ),
    ({"rollout": {"server": {"api_key_variable": "A-API_KEY"}}}, "must be the name of an environment variable"),
    (
        {"task": {"name": "arbench_dc", "path": "a.json", "responder": {"api_key_variable": "HF_TOKEN"}}},
        "task.responder.api_key_variable = 'HF_TOKEN': must be the name of an environment variable that ends in API_KEY",
    ),
    (
        {"task": {"name": "arbench_dc", "path": "a.json", "responder": {"api_key_variable": "API_KEY\n"}}},
        "must be the name of an environment variable",
    ),
    ({"team": {"agents": AGENTS, "router": {"kind": "sequence"}}}, "is empty, but router.kind is sequence"),
    ({"team": {"agents": AGENTS, "router": {"kind": "blind", "answer": "majority"}}}, "take router.kind=debate to vote unheard"),
    (
        {"team": {"agents": AGENTS, "router": {"kind": "debate", "answer": "majority", "judge": "a"}}},
        "team.router.answer = 'majority': does nothing where a judge decides",
    ),
    ({"team": {"agents": AGENTS, "recombine": True}}, "messages that others heard cannot be put beside other ones"),
    ({"team": {"agents": AGENTS, "router": {"kind": "robin"}}}, "did you mean 'round_robin'?"),
    (
        {"team": {"agents": AGENTS, "router": {"kind": "sequence", "sequence": ["solver", "planer"]}}},
        "team.router.sequence.1 = 'planer': no agent has this name; did you mean 'planner'?",
    ),
    ({"team": {"agents": [{"name": "a", "lora": {"targets": "q_proj"}}]}}, "write all-linear or a list such as [q_proj, v_proj]"),
    ({"team": {"agents": [{"name": "a", "lora": {"rank": 0}}]}}, "team.agents.0.lora.rank = 0: must be at least 1"),
    ({"training": {"a\nb": 1}}, "unknown key"),
]


@pytest.mark.parametrize(("sections", "expected"), ONE_PROBLEM)
def test_one_mistake_gives_one_line(sections: dict[str, Any], expected: str) -> None:
    found = lines(**sections)
    assert len(found) == 1, found
    assert expected in found[0]
    assert "\n" not in found[0]


@pytest.mark.parametrize("name", ["../x", "a/b", "Upper", "", ".hidden", "a b", "1a", "a" * 33, "é", "a\n", "con.txt"])
def test_agent_names_must_be_safe_file_names(name: str) -> None:
    (line,) = lines(team={"agents": [{"name": name}]})
    assert line.startswith("team.agents.0.name = ") and "must be a safe file name" in line


def test_a_recipe_without_a_team_says_so() -> None:
    (problem,) = problems({})
    assert str(problem).startswith("team: the recipe has no team; add team: {agents: [{name: solver, role: ...}]}, or name")
    assert len(problems([1])) == 1


def test_all_problems_are_reported_at_once_including_rules_between_keys(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "sead: 1\n"
        "team:\n"
        "  router: {kind: custom, rounds: 0}\n"
        "  agents: [{name: a, lora: {rank: 0}}, {name: a}, {role: x}]\n"
        "task: {name: dataset}\n"
        "rollout: {items_per_stage: 4, top_p: 0.5}\n"
        "trust_region: {delta: -1}\n"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["training.stages=0", "team.agents.zz.role=x"])
    error = caught.value
    assert isinstance(error, UserError)
    assert {problem.key for problem in error.problems} == {
        "sead", "team.router.rounds", "team.router.callable", "team.agents.0.lora.rank", "team.agents.1.name",
        "team.agents.2.name", "task.reward", "task.path", "rollout.top_p", "trust_region.delta", "trust_region.holdout",
        "training.stages", "team.agents.zz.role",
    }  # fmt: skip
    headline, *rest = str(error).splitlines()
    assert headline == f"{path} has 13 problems:"
    assert len(rest) == 13


def test_a_single_problem_is_a_single_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("team: {agents: [{name: a}]}\ntrust_region: {delta: 0}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value) == f"{path}: trust_region.delta = 0: must be greater than 0; try 0.01 (the paper's radius)"
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("trust_region.delta", 0)


def test_a_rule_that_rests_on_a_bad_key_is_not_reported_twice() -> None:
    assert len(lines(rollout={"items_per_stage": "four"}, trust_region={"holdout": 0.05})) == 1
    assert len(lines(team={"agents": [{"name": "Bad"}], "router": {"kind": "sequence", "sequence": ["Bad"]}})) == 1


def test_problems_are_empty_exactly_when_the_recipe_is_valid() -> None:
    for sections, _ in ONE_PROBLEM:
        with pytest.raises(ValidationError):
            Recipe.model_validate({"team": {"agents": AGENTS}, **sections})
    assert lines() == []
    assert lines(rollout={"server": {"api_key_variable": "TEAM_2_API_KEY"}}) == []
    assert lines(task=dataset(reward=["a.b:c", "d.e"]), base={"device": "cuda:1"}, training={"discount": 1}) == []


def test_scripts_get_the_same_checks() -> None:
    assert TeamTRConfig(seed=3).training.stages == 8
    with pytest.raises(RecipeError, match="two held-out groups"):
        TeamTRConfig.model_validate({"rollout": {"items_per_stage": 4}})


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _nodes(value)
    elif isinstance(node, list):
        for value in node:
            yield from _nodes(value)


def test_schema_is_closed_documented_and_its_references_resolve() -> None:
    schema = recipe_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    types = {"object", "array", "string", "number", "integer", "boolean", "null"}
    for node in _nodes(schema):
        if isinstance(node.get("$ref"), str):
            assert node["$ref"].removeprefix("#/$defs/") in schema["$defs"]
        if isinstance(node.get("type"), str):
            assert node["type"] in types
        if isinstance(node.get("properties"), dict) and node.get("type") == "object":
            assert node["additionalProperties"] is False
            for name, field in node["properties"].items():
                section = schema["$defs"].get(field.get("$ref", "").removeprefix("#/$defs/"), {})
                assert {**section, **field}["description"].endswith("."), name
    assert list(schema["properties"])[:4] == ["extends", "seed", "output_dir", "base"]


def test_schema_agrees_with_a_validator_of_json_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(recipe_schema())
    check: Callable[[Any], bool] = jsonschema.Draft202012Validator(recipe_schema()).is_valid
    team = {"agents": AGENTS}
    assert check({"team": team}) and check({"extends": "a.yaml"}) and check({"team": team, "task": dataset()})
    assert check({"extends": ["a.yaml", "b.yaml"]}) and check({"task": dataset()}), "a task file has no team of its own"
    assert (
        not check({"extends": []})
        and not check({"extends": [3]})
        and not check({"team": team, "sead": 1})
        and not check({"team": team, "training": {"stages": 0}})
    )


@pytest.mark.parametrize("items", [3, 4, 5])
def test_a_small_dataset_is_told_a_holdout_that_works(items: int) -> None:
    (found,) = lines(rollout={"items_per_stage": items})
    advised = re.search(r"use rollout.items_per_stage >= (\d+), or trust_region.holdout = ([\d.]+)", found)
    assert advised, found
    assert not lines(rollout={"items_per_stage": int(advised[1])})
    assert not lines(rollout={"items_per_stage": items}, trust_region={"holdout": float(advised[2])})


def test_two_items_are_told_to_become_more() -> None:
    (found,) = lines(rollout={"items_per_stage": 2})
    assert "holdout =" not in found.split(";")[-1]
    for size, advice in ((2, "add items"), (3, "use at most 3")):
        with pytest.raises(UserError, match=advice):
            DataOrder(SimpleNamespace(size=size), 0).check_stage(8)  # type: ignore[arg-type]
