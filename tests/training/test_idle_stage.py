"""The warning of a stage that taught nothing names keys that there are, and quotes items in their own language."""

import json

import pytest

from teamtr_lora.recipe import Recipe, TeamTRConfig
from teamtr_lora.team import Episode, Message
from teamtr_lora.training.idle_stage import idle_warning


def warning(config: TeamTRConfig, prompt: str = "2+2", said: str = "5") -> str:
    message = Message("solver", 0, [], [1], [0.0], "v0000", "stop", said)
    episodes = [Episode(f"item-{n}", n, prompt, 0, messages=[message], rewards=[0.0]) for n in range(2)]
    return idle_warning(episodes, config, stage=1, idle=1, stops=False)


@pytest.mark.parametrize(("task", "named"), [("countdown", False), ("column_sum", False), ("zebra", True)])
def test_only_a_reward_that_can_be_set_is_named(task: str, named: bool) -> None:
    recipe = Recipe.model_validate({"team": {"agents": [{"name": "solver"}]}, "task": {"name": task}})
    assert ("task.reward" in warning(recipe)) == named
    assert "on the two episodes below" in warning(recipe)
    assert "check reward_funcs" in warning(TeamTRConfig())


def test_a_prompt_is_readable_in_any_language_and_steers_no_terminal() -> None:
    told = warning(TeamTRConfig(), prompt="求最小的实数 C\n→ \x1b[2J\u202e", said="é\ud800")
    line = told.splitlines()[1]
    assert "求最小的实数 C\\n→ \\u001b[2J\\u202e" in line and '"é\\ud800"' in line
    assert json.loads(line.partition("-> solver: ")[2]) == "é\ud800"
