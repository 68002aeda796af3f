"""The recipes of recipes/tasks: each is valid, keeps the paper's settings where it says so, and can be planned.

Planning needs items and a base's shapes. Items come from rows of our own in each benchmark's format; the hub's bases are stood in
for by folders that have their shapes and no weights (a header, then a hole in the file).
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.study.plan import make_plan
from teamtr_lora.tasks.machinery.task_settings import ItemSource
from teamtr_lora.tasks.table import BY_NAME

ROOT = Path(__file__).resolve().parents[2] / "recipes" / "tasks"
REAL = {"qwen3_1.7b": "Qwen/Qwen3-1.7B", "qwen3_8b": "Qwen/Qwen3-8B"}
RECIPES = sorted(ROOT.rglob("*.yaml"))
ROWS: dict[str, list[dict[str, Any]]] = {
    "math": [{"id": i, "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(40)],
    "zebralogic": [
        {"id": i, "puzzle": f"Puzzle {i}", "solution": {"header": ["House", "Name"], "rows": [["1", "Ann"], ["2", "Bob"]]}}
        for i in range(40)
    ],
    "arbench_dc": [
        {
            "id": i,
            "initial_information": {
                "time": "noon",
                "location": f"House {i}",
                "victim": dict.fromkeys(("name", "introduction", "cause_of_death", "murder_weapon"), "x"),
                "suspect": [{"name": name, "introduction": "i"} for name in ("Ann", "Bob")],
            },
            "suspects": [{"name": name, "task": "t", "story": "s"} for name in ("Bob", "Ann")],
            "label": 1,
        }
        for i in range(40)
    ],
    "arbench_sp": [{"id": i, "surface": f"Why {i}?", "bottom": "Because."} for i in range(40)],
    "tau2": [
        {
            "id": str(i),
            "user_scenario": {"instructions": f"Call {i}"},
            "evaluation_criteria": {"actions": [], "reward_basis": ["DB"]},
        }
        for i in range(160)
    ],
}
SHAPES = {
    "Qwen/Qwen3-1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "Qwen/Qwen3-8B": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
}
PARAMETERS = {"Qwen/Qwen3-1.7B": 1.72e9, "Qwen/Qwen3-8B": 8.19e9}


@pytest.fixture(scope="module")
def bases(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, shape in SHAPES.items():
        folder = tmp_path_factory.mktemp("base") / name.split("/")[1]
        folder.mkdir()
        for file in tiny_base.iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                (folder / file.name).write_bytes(file.read_bytes())
        config = Qwen3Config(
            **shape, num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
            tie_word_embeddings=name == "Qwen/Qwen3-1.7B", dtype="bfloat16",
        )  # fmt: skip
        config.architectures = ["Qwen3ForCausalLM"]
        config.save_pretrained(folder)
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config)
        _write_header(folder / "model.safetensors", {n: list(p.shape) for n, p in model.named_parameters()})
        made[name] = folder
    return made


def _write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2
        for length in shape:
            size *= length
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def data_for(recipe: Recipe, folder: Path) -> list[str]:
    """Overrides that give the task our own rows where it needs any."""
    task = recipe.task
    if not isinstance(task, ItemSource) or (task.path is None and task.hub is None):
        return []
    kind = task.name.split("_")[0] if task.name.startswith("tau2") else task.name
    rows = ROWS.get(kind, ROWS["math"])
    overrides = ["task.hub=null"]
    if kind == "tau2":
        domain = task.name.removeprefix("tau2_")
        tables = json.loads((Path(__file__).parents[1] / "tasks" / "tau2_tables.json").read_text())
        (folder / f"{domain}_db.json").write_text(json.dumps(tables[domain]))
        (folder / f"{domain}_policy.md").write_text("Be kind. " * 500)
    for key in ("path", "test_path"):
        given = [{**row, **{text: f"{key}: {row[text]}" for text in ("problem", "surface") if text in row}} for row in rows]
        (folder / f"{key}.jsonl").write_text("\n".join(map(json.dumps, given)))
        if key == "path" or task.test_path or task.hub:
            overrides.append(f"task.{key}={folder / f'{key}.jsonl'}")
    return overrides


def test_every_task_has_its_recipes() -> None:
    tasks = BY_NAME.keys() - {"script", "dataset", "custom"}
    small = {"column_sum", "arithmetic", "products", "largest", "letter_count", "countdown"}
    assert {path.stem for path in (ROOT / "smollm2").glob("*.yaml")} == tasks | {"parent"}
    for folder in REAL:
        assert {path.stem for path in (ROOT / folder).glob("*.yaml")} - {"parent"} == tasks - small
    generated = small | {"zebra", "autologi", "planbench_blocksworld", "arbench_gn"}
    assert {path.stem for path in (ROOT / "nano").glob("*.yaml")} == generated | {"parent"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_says_what_it_is_for_and_keeps_to_it(path: Path) -> None:
    recipe, first = load_recipe(path), path.read_text().splitlines()[0]
    assert first.startswith("# ")
    if path.stem != "parent":
        assert recipe.task.name == path.stem
    if path.parent.name in REAL:
        assert recipe.base.source == REAL[path.parent.name] and recipe.base.source.split("/")[1] in first
        assert len(recipe.team.agents) == 3 and recipe.team.router.kind == "round_robin"
        assert recipe.trust_region.delta == 0.01 and recipe.rollout.temperature == 0.8
        turns = getattr(recipe.task, "turns", 0)
        assert 3 * recipe.team.router.rounds > turns, "a message is a turn, and one answer follows"


@pytest.mark.parametrize("path", [p for p in RECIPES if p.parent.name == "nano"], ids=lambda path: path.stem)
def test_nano_recipes_can_be_planned(path: Path) -> None:
    plan = make_plan(load_recipe(path))
    assert plan.memory_total_bytes < 4e9


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.parent.name != "nano"], ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_others_can_be_planned_with_data_and_shapes(
    path: Path, bases: dict[str, Path], tiny_base: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(path)
    base = bases.get(recipe.base.source, tiny_base)
    plan = make_plan(load_recipe(path, [f"base.source={base}", "base.device=cpu", *data_for(recipe, tmp_path)]))
    if path.parent.name in REAL:
        assert plan.parameters == pytest.approx(PARAMETERS[recipe.base.source], rel=0.01)
        assert plan.memory_total_bytes < 141e9, "in float32, twice what a GPU needs for the weights"
        per_update = recipe.rollout.items_per_stage * recipe.rollout.episodes_per_item
        assert (plan.episodes_per_update, plan.updates_per_stage) == (per_update, 3)
