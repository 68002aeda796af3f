"""`plan --gpus`: what each process does, counted by hand for the quickstart."""

import json
from pathlib import Path

import pytest

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.sharding import split_bytes
from teamtr_lora.base.source import resolve
from teamtr_lora.cli import main
from teamtr_lora.recipe import load_recipe
from teamtr_lora.study.expected_time import Speeds
from teamtr_lora.study.plan import make_plan

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"  # 48 items x 4 episodes x 3 messages of 12 tokens, 3 agents
ITEMS = "rollout.items_per_stage=47"
SPLIT = ["rollout.engine=vllm_server", 'rollout.server.urls=["http://host:8000"]', "training.shard=always"]


def test_work_is_dealt_out_and_the_sums_of_gradients_are_counted() -> None:
    recipe = load_recipe(RECIPE, [ITEMS, "training.tokens_per_microbatch=1024", "training.inner_epochs=3"])
    alone, plan = make_plan(recipe), make_plan(recipe, processes=3, nodes=3)
    share = plan.share
    assert alone.share is None and share is not None and (share.processes, share.nodes) == (3, 3)
    assert (share.items, share.episodes) == (16, 64), "47 items: 16, 16 and 15"
    assert share.microbatches == -(-share.all_microbatches // 3)
    assert share.idle["rollouts"] == pytest.approx(1 / 48), "of three times 16 places one stays empty"
    # three epochs of two sums of 8-byte integers; a ring of three sends two thirds of each, twice
    assert share.sent_bytes["gradients"] == pytest.approx(6 * 8 * 77_824 * 4 / 3, abs=1)
    assert "layers of the base" not in share.sent_bytes and not share.split_base
    for part, size in plan.memory_bytes.items():
        assert size <= alone.memory_bytes[part] or part == "libraries", part
    # an evaluation has 512 episodes: batches of 256, or a third of them
    assert plan.memory_bytes["KV cache"] / alone.memory_bytes["KV cache"] == pytest.approx(171 / 256)


def test_a_split_base_takes_less_memory_and_more_bytes() -> None:
    recipe = load_recipe(RECIPE, SPLIT)
    alone, plan = make_plan(recipe), make_plan(recipe, processes=4)
    share, facts = plan.share, base_facts(resolve("nano", None))
    assert share is not None and share.split_base and plan.memory_bytes["base"] == split_bytes(facts, 4, 4)
    assert plan.memory_bytes["base"] < alone.memory_bytes["base"] == 4 * facts.parameters
    layers = 4 * sum(linear.in_features * linear.out_features for linear in facts.linears)
    passes = 2 * recipe.training.inner_epochs * share.microbatches
    assert share.sent_bytes["layers of the base"] == pytest.approx(passes * layers * 3 / 4, abs=1)
    assert share.items == 48, "one process asks the servers for all episodes"


def test_times_are_those_of_the_busiest_process() -> None:
    recipe = load_recipe(RECIPE, [ITEMS])
    speeds = Speeds(
        "a test", rollout_seconds=0.1, update_seconds=0.2, start_seconds=5.0, tokens_per_message=12.0, window_kept=1.0
    )
    one, three = (make_plan(recipe, speeds, processes=count).expected_time for count in (1, 3))
    assert one is not None and three is not None
    assert three.rollouts_seconds == pytest.approx(one.rollouts_seconds * 16 / 47)
    assert three.updates_seconds < one.updates_seconds / 2 and three.start_seconds == one.start_seconds


def test_the_command_counts_gpus_of_all_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["rollout.engine=vllm", "rollout.vllm.tensor_parallel=2"]
    assert main(["plan", str(RECIPE), *engine, "--gpus", "4", "--nodes", "3", "--json"]) == 0
    share = json.loads(capsys.readouterr().out)["share"]
    assert (share["processes"], share["nodes"], share["gpus"]) == (6, 3, 2)
    assert main(["plan", str(RECIPE), "--gpus", "2"]) == 0
    shown = capsys.readouterr().out
    assert "each of 2 processes" in shown and "sends for an update: gradients" in shown and "memory of each" in shown
    assert main(["plan", str(RECIPE), *engine, "--gpus", "3"]) == 2
    assert "no multiple of rollout.vllm.tensor_parallel = 2" in capsys.readouterr().err
