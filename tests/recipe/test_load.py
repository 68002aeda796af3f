"""Files, parents and overrides become one recipe."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from teamtr_lora.algorithm.variants.chosen import Variants
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, RolloutSection, differences, dump_recipe, load_recipe
from teamtr_lora.recipe.yaml_text import MAX_BYTES, parse, write
from teamtr_lora.tasks.dataset import DatasetSettings
from teamtr_lora.tasks.generated.column_sum import ColumnSumSettings

Write = Callable[..., Path]


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_defaults_are_the_documented_ones(recipe_file: Write) -> None:
    recipe = load_recipe(recipe_file())
    assert recipe.base.source == "nano"
    assert [agent.name for agent in recipe.team.agents] == ["planner", "solver"]
    assert (recipe.team.agents[0].lora.rank, recipe.team.agents[0].lora.alpha) == (8, 16.0)
    assert recipe.task == ColumnSumSettings(digits=3)
    assert (recipe.rollout.items_per_stage, recipe.rollout.episodes_per_item, recipe.training.stages) == (16, 8, 8)
    assert (recipe.trust_region.delta, recipe.trust_region.confidence) == (0.01, 0.95)
    assert Variants.of(recipe).reuse.judging_items(recipe.rollout.items_per_stage) == 4


def test_recipe_remembers_its_folder_and_does_not_dump_it(recipe_file: Write, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file(name="deep/er/recipe.yaml"))
    assert recipe.folder == (tmp_path / "deep" / "er").resolve()
    assert "folder" not in dump_recipe(recipe)
    elsewhere = recipe.placed_in(tmp_path)
    assert elsewhere.folder == tmp_path and elsewhere == recipe


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.e-3", "0.001", "+1e-3", ".1e-2"])
def test_scientific_numbers_are_floats_in_files_and_overrides(recipe_file: Write, text: str) -> None:
    assert load_recipe(recipe_file(f"training: {{learning_rate: {text}}}\n")).training.learning_rate == 0.001
    assert load_recipe(recipe_file(), [f"training.learning_rate={text}"]).training.learning_rate == 0.001


def test_scalars_are_those_of_yaml_1_2() -> None:
    assert parse("[no, 010, 1:30, 2024-01-01, 8_192, true, ~, '1e-3']", "x") == [
        "no", "010", "1:30", "2024-01-01", 8192, True, None, "1e-3",
    ]  # fmt: skip


def test_ints_serve_as_floats_but_text_never_serves_as_a_number(recipe_file: Write) -> None:
    assert load_recipe(recipe_file(), ["rollout.temperature=2"]).rollout.temperature == 2.0
    for bad in ("training.stages='8'", "training.stages=true", "training.stages=2.0", "rollout.temperature='1'"):
        assert "must be a" in error_of(recipe_file(), bad)
    for bad in ("training.gradient_checkpointing=yes", "training.gradient_checkpointing=1"):
        assert "must be true or false" in error_of(recipe_file(), bad)


def test_overrides_reach_sections_lists_and_agents_by_name(recipe_file: Write) -> None:
    recipe = load_recipe(
        recipe_file("training: {stages: 2}\n"),
        ["team.agents.0.lora.rank=4", "team.agents.solver.lora.rank=2", "training.stages=3", "task.digits=5"],
    )
    assert [agent.lora.rank for agent in recipe.team.agents] == [4, 2]
    assert (recipe.training.stages, recipe.task) == (3, ColumnSumSettings(digits=5))


def test_override_values_are_yaml_but_a_colon_does_not_make_a_mapping(recipe_file: Write) -> None:
    recipe = load_recipe(
        recipe_file(),
        ["tracking={trackers: [wandb]}", "team.router.done_marker=DONE:", "team.protocol.system=a=b: c", "output_dir=null"],
    )
    assert recipe.tracking.trackers == ["wandb"]
    assert recipe.team.router.done_marker == "DONE:"
    assert recipe.team.protocol.system == "a=b: c"
    assert recipe.output_dir is None


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.stages", "must be section.key=value"),
        ("=3", "must be section.key=value"),
        ("training..stages=3", "must be section.key=value"),
        ("trainig.stages=3", "trainig: unknown key; did you mean 'training'?"),
        ("training.stagse=3", "training.stagse = 3: unknown key; did you mean 'stages'?"),
        ("team.agents.planer.lora.rank=4", "nothing in team.agents is named 'planer'; did you mean 'planner'?"),
        ("team.agents.zzz.lora.rank=4", "it has planner, solver"),
        ("team.agents.2.lora.rank=4", "team.agents has no element 2; it has 2, counted from 0"),
        ("team.agents.0.name.x=4", "team.agents.0.name is a value, not a section"),
        ("training.stages=[", "cannot be read as YAML"),
    ],
)
def test_bad_override_names_itself(recipe_file: Write, override: str, expected: str) -> None:
    assert expected in error_of(recipe_file(), override)


def test_extends_merges_deeply_and_lists_replace(recipe_file: Write) -> None:
    recipe_file("training: {stages: 5, inner_epochs: 2}\nseed: 7\n", name="grand.yaml")
    recipe_file("extends: ../grand.yaml\ntraining: {stages: 6}\n", name="sub/parent.yaml", team="")
    child = recipe_file("extends: sub/parent.yaml\ntraining: {order: fixed}\n", team="team: {agents: [{name: solo}]}\n")
    recipe = load_recipe(child, ["training.minibatches_per_epoch=9"])
    training = recipe.training
    assert (training.stages, training.inner_epochs, training.order, training.minibatches_per_epoch) == (6, 2, "fixed", 9)
    assert recipe.seed == 7
    assert [agent.name for agent in recipe.team.agents] == ["solo"]
    assert recipe.folder == child.parent.resolve()


def test_child_may_choose_another_task_than_its_parent(recipe_file: Write) -> None:
    recipe_file("task: {name: column_sum, digits: 4}\n", name="parent.yaml")
    child = recipe_file("extends: parent.yaml\ntask: {name: dataset, path: a.csv, reward: 'm:f'}\n", team="")
    assert load_recipe(child).task == DatasetSettings(name="dataset", path="a.csv", reward="m:f")


def test_extends_in_a_circle_is_named(recipe_file: Write) -> None:
    recipe_file("extends: b.yaml\n", name="a.yaml")
    b = recipe_file("extends: a.yaml\n", name="b.yaml")
    assert "circle (b.yaml -> a.yaml -> b.yaml)" in error_of(b)
    assert "circle (self.yaml -> self.yaml)" in error_of(recipe_file("extends: self.yaml\n", name="self.yaml"))


@pytest.mark.parametrize("named", ["https://example.org/a.yaml", "file:///a.yaml", "//host/a.yaml", "3", "[]", "''", "{a: b}"])
def test_extends_must_be_a_local_file(recipe_file: Write, named: str) -> None:
    recipe_file(name="good.yaml")
    assert "extends = " in error_of(recipe_file(f"extends: {named}\n"))
    assert "extends = " in error_of(recipe_file(f"extends: [good.yaml, {named}]\n"))


def test_endless_chain_of_parents_stops(recipe_file: Write) -> None:
    for i in range(70):
        recipe_file(f"extends: r{i + 1}.yaml\n", name=f"r{i}.yaml")
    assert "more than 64 recipe files are extended in all" in error_of(recipe_file("extends: r0.yaml\n"))


def test_of_several_parents_the_later_win_and_the_file_over_all(recipe_file: Write, tmp_path: Path) -> None:
    recipe_file("training: {stages: 2, inner_epochs: 2, order: fixed}\nseed: 5\n", name="base.yaml")
    recipe_file("training: {stages: 3, inner_epochs: 3}\ntask: {name: countdown, numbers: 4}\n", name="task.yaml", team="")
    child = recipe_file("extends: [base.yaml, task.yaml]\ntraining: {stages: 4}\n", name="here/../child.yaml", team="")
    recipe = load_recipe(child)
    assert (recipe.training.stages, recipe.training.inner_epochs, recipe.training.order, recipe.seed) == (4, 3, "fixed", 5)
    assert recipe.task.name == "countdown"
    swapped = load_recipe(recipe_file("extends: [task.yaml, base.yaml]\n", name="swapped.yaml", team=""))
    assert (swapped.training.stages, swapped.training.inner_epochs) == (2, 2)
    both = load_recipe([tmp_path / "base.yaml", tmp_path / "task.yaml"], ["training.stages=4"])
    assert both == recipe, "several files are one that extends them"
    assert load_recipe([child]) == load_recipe(str(child)) == recipe
    with pytest.raises(UserError, match="name at least one recipe"):
        load_recipe([])


def test_of_several_files_the_last_ones_folder_counts_and_problems_name_them_all(recipe_file: Write, tmp_path: Path) -> None:
    base, task = recipe_file(name="bases/b.yaml"), recipe_file("task: {name: countdown}\n", name="tasks/t.yaml", team="")
    assert load_recipe([base, task]).folder == (tmp_path / "tasks").resolve()
    with pytest.raises(UserError) as caught:
        load_recipe([base, task], ["training.stages=0"])
    assert str(caught.value).startswith(f"{base} + {task}: training.stages = 0")


def test_a_recipe_may_come_in_by_two_parents_but_not_by_itself_or_without_end(recipe_file: Write) -> None:
    recipe_file("seed: 3\n", name="grand.yaml")
    recipe_file("extends: grand.yaml\ntraining: {stages: 2}\n", name="left.yaml", team="")
    recipe_file("extends: grand.yaml\ntraining: {order: fixed}\n", name="right.yaml", team="")
    recipe = load_recipe(recipe_file("extends: [left.yaml, right.yaml]\n", team=""))
    assert (recipe.seed, recipe.training.stages, recipe.training.order) == (3, 2, "fixed")
    assert "circle (me.yaml -> me.yaml)" in error_of(recipe_file("extends: [left.yaml, me.yaml]\n", name="me.yaml", team=""))
    for i in range(14):
        recipe_file(f"extends: [d{i + 1}.yaml, d{i + 1}.yaml]\n", name=f"d{i}.yaml", team="")
    recipe_file(name="d14.yaml")
    assert "more than 64 recipe files" in error_of(recipe_file("extends: d0.yaml\n", team=""))


def test_missing_file_suggests_its_neighbours(recipe_file: Write, tmp_path: Path) -> None:
    recipe_file(name="quickstart.yaml")
    assert f"did you mean {str(tmp_path / 'quickstart.yaml')!r}?" in error_of(tmp_path / "quikstart.yaml")
    assert "holds quickstart.yaml" in error_of(tmp_path / "zzz")
    assert "does not exist" in error_of(tmp_path / "nowhere" / "a.yaml")
    assert "is not a file" in error_of(tmp_path)
    (tmp_path / "first_run").mkdir()
    found = error_of(tmp_path / "frist_run")
    assert f"no such recipe or run directory; did you mean {str(tmp_path / 'first_run')!r}?" in found
    assert "first_run" not in error_of(tmp_path / "zzz.yaml")
    assert "no such recipe" in error_of(recipe_file("extends: gone.yaml\n"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\ntraining: {stages: [}\n", "line 3, column"),
        ("seed: 1\nseed: 2\n", "line 3, column 1: the key 'seed' appears twice (first on line 2); keep one"),
        ("training:\n  stages: 1\n  stages: 1\n", "line 4, column 3: the key 'stages' appears twice"),
        ("3: x\n", "the key '3' is not text"),
        ("seed: !!python/object/apply:os.getcwd []\n", "line 2"),
        ("seed: \x01\n", "line 2: not valid YAML"),
        ("seed: !!int zzz\n", "line 2, column 7: 'zzz' is not what its tag 'tag:yaml.org,2002:int' says"),
        ("seed: !!timestamp soon\n", "line 2, column 7: 'soon' is not what its tag"),
        ("seed: !!bool perhaps\n", "line 2, column 7: 'perhaps' is not what its tag"),
        ("a: {<<: 3}\n", "line 2, column 5: expected a mapping"),
        ("a: *b\n", "line 2, column 4: found undefined alias 'b'"),
        ("---\na: 1\n", "line 2"),
        ("seed: " + "9" * 5000 + "\n", "not valid YAML"),
    ],
)
def test_bad_yaml_names_the_line(recipe_file: Write, text: str, expected: str) -> None:
    message = error_of(recipe_file(text))
    assert expected in message and "recipe.yaml" in message and "\n" not in message


@pytest.mark.parametrize(("text", "expected"), [("", "is empty"), ("- a\n", "holds list"), ("just text\n", "holds str")])
def test_a_recipe_is_a_mapping(recipe_file: Write, text: str, expected: str) -> None:
    assert expected in error_of(recipe_file(text, team=""))


def test_hostile_files_are_refused_quickly(recipe_file: Write, tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
    assert "once aliases are expanded" in error_of(recipe_file(bomb))
    assert "an alias contains itself" in error_of(recipe_file("a: &a [*a]\n"))
    assert "nested more than 64 deep" in error_of(recipe_file("a: " + "[" * 100_000 + "\n"))
    assert f"larger than {MAX_BYTES} bytes" in error_of(recipe_file("#" * MAX_BYTES))
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"seed: 1\n\xff\xfe")
    assert "line 2: not UTF-8" in error_of(binary)


def test_small_aliases_and_merge_keys_still_work(recipe_file: Write) -> None:
    team = "team:\n  agents:\n  - {name: a, lora: &l {rank: 2}}\n  - {name: b, lora: {<<: *l, alpha: 4}}\n"
    agents = load_recipe(recipe_file(team=team)).team.agents
    assert [(agent.lora.rank, agent.lora.alpha) for agent in agents] == [(2, 16.0), (2, 4.0)]


def test_dump_starts_with_who_plays_and_is_complete(recipe_file: Write) -> None:
    text = dump_recipe(load_recipe(recipe_file()))
    tops = [line.split(":")[0] for line in text.splitlines() if line[0] not in " -"]
    assert tops[:6] == ["seed", "output_dir", "base", "team", "task", "rollout"]
    assert set(tops) == set(Recipe.model_fields)


text_values = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["1e-3", "no", "null", "~", "8", "a: b"]
)


@settings(max_examples=60, deadline=None)
@given(
    role=text_values,
    system=text_values,
    rate=st.floats(min_value=1e-12, max_value=10, exclude_min=True),
    delta=st.floats(min_value=1e-9, max_value=1e9),
    digits=st.integers(1, 8),
    discount=st.just("auto") | st.floats(0, 1),
    keep=st.sampled_from(["all", "none"]) | st.integers(0, 100),
    targets=st.just("all-linear") | st.lists(st.text("abc_1e-", min_size=1), min_size=1, max_size=3),
)
def test_dump_and_load_round_trip(
    tmp_path_factory: pytest.TempPathFactory, role: str, system: str, rate: float, delta: float, digits: int,
    discount: object, keep: object, targets: object,
) -> None:  # fmt: skip
    recipe = Recipe.model_validate(
        {
            "team": {"protocol": {"system": system}, "agents": [{"name": "a", "role": role, "lora": {"targets": targets}}]},
            "task": {"digits": digits, "reward_range": [-1, 2.5]},
            "training": {"learning_rate": rate, "discount": discount},
            "trust_region": {"delta": delta},
            "diagnostics": {"save_episodes": keep},
        }
    )
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8", newline="")
    again = load_recipe(path)
    assert again == recipe
    assert differences(again, recipe) == []


@settings(max_examples=100, deadline=None)
@given(text_values)
@example("\x85")
@example("a\u2028b\r\ufeff")
def test_any_text_survives_yaml(text: str) -> None:
    assert parse(write({"k": [text]}), "x") == {"k": [text]}


def test_differences_name_the_keys_and_both_values(recipe_file: Write) -> None:
    a = load_recipe(recipe_file())
    assert differences(a, load_recipe(recipe_file())) == []
    b = load_recipe(recipe_file(), ["team.agents.solver.lora.rank=2", "training.stages=9", "output_dir=x"])
    found = [("output_dir", None, "x"), ("team.agents.1.lora.rank", 8, 2), ("training.stages", 8, 9)]
    assert differences(a, b) == found
    assert differences(a, b, {"output_dir"}) == found[1:]
    assert differences(a, b, {"output_dir", "team"}) == found[2:]
    assert differences(a, b, {"output_dir", "team", "training.stages"}) == []
    c = load_recipe(recipe_file("task: {name: dataset, hub: x, reward: 'm:f'}\n"))
    assert differences(a, c)[0] == ("task.name", "column_sum", "dataset")
    assert a != b and a != c


def test_import_pulls_in_no_heavy_library() -> None:
    code = (
        "import sys, teamtr_lora.recipe as r; r.recipe_schema();"
        "print([m for m in ('torch', 'transformers', 'numpy', 'peft', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_engine_with_its_own_base_takes_its_share_of_a_gpu() -> None:
    taken = {engine: rollout_of(engine).engine_bytes(1001, 64) for engine in ("transformers", "vllm", "vllm_server")}
    assert taken == {"transformers": 0, "vllm": 250, "vllm_server": 0}
    assert rollout_of("vllm").engine_bytes(None, 64) == 0, "a CPU has no such share"


def test_an_engine_whose_cache_has_a_size_takes_that_and_its_base_and_asks_for_no_share() -> None:
    rollout = RolloutSection.model_validate(
        {"engine": "vllm", "vllm": {"kv_cache_gib": 6, "tensor_parallel": 2, "offload": "never"}}
    )
    assert rollout.engine_bytes(80 * 2**30, 3 * 2**30) == 7.5 * 2**30
    assert rollout.engine_bytes(None, 3 * 2**30) == 0


def rollout_of(engine: str) -> RolloutSection:
    return RolloutSection.model_validate(
        {"engine": engine, "vllm": {"memory_share": 0.25}, "server": {"urls": ["http://localhost:8000"]}}
    )
