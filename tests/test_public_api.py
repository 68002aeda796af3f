"""What `import teamtr_lora` offers: every name to be found, nothing heavy loaded for it."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import teamtr_lora
from teamtr_lora import EvalOptions, TeamSpec, TeamTRConfig, TeamTRTrainer, ask_team, evaluate_team, load_recipe

RECIPE = """\
base: {{source: {base}, device: cpu}}
team: {{agents: [{{name: planner, lora: {{rank: 2}}}}, {{name: solver, lora: {{rank: 2}}}}]}}
task: {{name: column_sum, digits: 2}}
rollout: {{items_per_stage: 8, episodes_per_item: 2, max_message_tokens: 4}}
training: {{stages: 1, inner_epochs: 1}}
evaluation: {{items: 4}}
output_dir: {run}
"""


def test_every_public_name_is_listed_and_none_is_loaded_for_it() -> None:
    code = (
        "import sys, teamtr_lora; assert set(teamtr_lora.__all__) <= set(dir(teamtr_lora)), dir(teamtr_lora); "
        "assert not {'torch', 'transformers', 'pydantic'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "__version__" in dir(teamtr_lora) and "__getattr__" in dir(teamtr_lora)


def test_the_module_says_what_each_name_is_for() -> None:
    described = set((teamtr_lora.__doc__ or "").replace(";", " ").split())
    assert set(teamtr_lora.__all__) <= described


def test_every_public_method_of_the_trainer_is_explained() -> None:
    public = {name: member for name, member in vars(TeamTRTrainer).items() if not name.startswith("_")}
    assert {"from_recipe", "train", "evaluate", "add_callback", "open", "close"} <= set(public)
    assert [name for name, member in public.items() if not inspect.getdoc(member)] == []
    arguments = list(inspect.signature(TeamTRTrainer).parameters)
    assert [name for name in arguments if f"`{name}`" not in (TeamTRTrainer.__doc__ or "")] == []


@pytest.mark.parametrize("name", sorted({*teamtr_lora.__all__} - {"RecipeError", "UserError"}))
def test_help_is_a_page_to_read(name: str) -> None:
    page = pydoc.plain(pydoc.render_doc(getattr(teamtr_lora, name)))
    longest = 118 if name == "Task" else 80  # a task has many hooks, each of them a line or two
    assert len(page.splitlines()) <= longest and "pydantic-core" not in page and "__pydantic" not in page
    assert len((getattr(teamtr_lora, name).__doc__ or "").strip().splitlines()) > 2, "what it is and what it takes"


def test_help_of_the_settings_names_every_key() -> None:
    page = pydoc.plain(pydoc.render_doc(TeamTRConfig))
    sections = [field.annotation for field in TeamTRConfig.model_fields.values()]
    keys = [*TeamTRConfig.model_fields, *(key for section in sections for key in getattr(section, "model_fields", {}))]
    assert len(keys) > 50 and [key for key in keys if key not in page] == []
    assert len(page.splitlines()) < 60 and max(map(len, page.splitlines())) <= 135
    spec = pydoc.plain(pydoc.render_doc(TeamSpec))
    assert [key for key in ("rank", "quantization", "reasoning_tags", "judge", *TeamSpec.model_fields) if key not in spec] == []


def test_a_team_is_asked_and_evaluated_after_training(tiny_base: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(base=tiny_base, run=tmp_path / "run"))
    with TeamTRTrainer.from_recipe(load_recipe(path)) as trainer:
        done = trainer.train()
        inside = trainer.evaluate(k=2)
    run = Path(done.run_dir)
    capsys.readouterr()
    episode = ask_team(run, "12+34", seed=3)
    assert [message.agent for message in episode.messages] == ["planner", "solver"] and episode.prompt == "12+34"
    assert [m.text for m in ask_team(run, "12+34", seed=3).messages] == [m.text for m in episode.messages]
    result = evaluate_team(run, EvalOptions(k=2))
    assert result.evaluation.as_dict() == inside.as_dict(), "a stored team is the one that was trained"
    assert Path(result.folder).parent == run / "evaluations"
    assert capsys.readouterr().out == ""


def test_type_checkers_are_told_and_the_licence_is_said_once() -> None:
    assert (Path(teamtr_lora.__file__).parent / "py.typed").read_bytes() == b""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and not [line for line in project["classifiers"] if line.startswith("License")]
    assert "Typing :: Typed" in project["classifiers"]


def test_help_of_the_package_is_a_page() -> None:
    page = pydoc.plain(pydoc.render_doc(teamtr_lora))
    assert len(page.splitlines()) < 80
    assert all(name in page and name in dir(teamtr_lora) for name in teamtr_lora.__all__)
