"""The page of all recipe keys, against the recipes themselves."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from teamtr_lora.algorithm.variants.region import REGIONS, TrustRegion
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RecipeError, TeamTRConfig
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.recipe.reference import recipe_keys
from teamtr_lora.recipe.words import key_paths

SMALLEST = {"team": {"agents": [{"name": "solver"}]}}


def value_at(data: Any, name: str) -> Any:
    for part in name.split("."):
        data = data[0 if part == "*" else part]
    return data


def test_every_key_is_there_once_and_has_words() -> None:
    keys = recipe_keys()
    names = [key.name for key in keys]
    assert {*key_paths()} <= {*names}
    assert len({(key.name, key.tasks) for key in keys}) == len(keys)
    assert all(key.meaning for key in keys)
    assert names.index("base") < names.index("team") < names.index("training.stages")


def test_defaults_are_those_of_a_recipe_that_says_nothing() -> None:
    data = Recipe.model_validate(SMALLEST).model_dump(mode="json")
    with_default = [key for key in recipe_keys() if key.default and not key.tasks]
    assert len(with_default) > 60
    for key in with_default:
        assert json.loads(key.default) == value_at(data, key.name), key


def test_a_word_finds_a_section_then_names_then_meanings() -> None:
    assert {key.name.split(".")[0] for key in recipe_keys("trust_region")} == {"trust_region"}
    assert [key.name for key in recipe_keys("trust_region.delta")] == ["trust_region.delta"]
    assert {key.name for key in recipe_keys("temperature")} == {
        "rollout.temperature", "evaluation.temperature", "task.responder.temperature",
    }  # fmt: skip
    assert "training.gradient_checkpointing" in {key.name for key in recipe_keys("less MEMORY")}
    memory = [key.name for key in recipe_keys("memory")]
    assert memory[0] == "rollout.vllm.memory_share" and "training.head_chunk_tokens" in memory, "few have it in their name"
    assert len(recipe_keys("batch")) == 6 and "task.blocks" not in {key.name for key in recipe_keys("rate")}, (
        "generated is no rate"
    )
    with pytest.raises(UserError, match="did you mean 'learning_rate'"):
        recipe_keys("learning_rte")


def test_keys_of_tasks_say_whose_they_are() -> None:
    rewards = {key.tasks: key.takes for key in recipe_keys("task.reward")}
    assert rewards["zebralogic", "zebra"] == "one of puzzle, cells" and ("dataset",) in rewards
    assert not any("script" in key.tasks for key in recipe_keys())
    (name,) = recipe_keys("task.name")
    assert "gsm8k" in name.takes and "script" not in name.takes


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "trust_region.delta"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "  trust_region.delta = 0.01  (a number, greater than 0)"
    assert main(["keys", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(recipe_keys())
    assert main(["keys", "trust_reigon"]) == 2
    assert "did you mean 'trust_region'" in capsys.readouterr().err


def test_what_a_script_adds_is_explained_like_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the keys were asked for before."""

    class Cautious(TrustRegion):
        words = "as careful as can be"

    def meaning(name: str) -> str:
        (key,) = [key for key in recipe_keys() if key.name == name]
        return f"{key.takes}. {key.meaning}"

    before = meaning("trust_region.kind")
    monkeypatch.setitem(REGIONS, "cautious", Cautious)
    monkeypatch.setitem(REGIONS, "wordless", TrustRegion)
    monkeypatch.setitem(ENGINES, "mine", replace(ENGINES["transformers"], description="one of mine"))
    told = meaning("trust_region.kind")
    assert "none, cautious, wordless" in told and told.endswith("; cautious: as careful as can be; wordless.")
    assert meaning("rollout.engine").endswith("; mine: one of mine.")
    with pytest.raises(RecipeError, match="none, cautious, wordless; .*did you mean 'cautious'"):
        TeamTRConfig(trust_region={"kind": "cautios"})
    monkeypatch.undo()
    assert meaning("trust_region.kind") == before
