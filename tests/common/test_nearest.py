"""A hint is of the name that was meant, or there is none."""

from __future__ import annotations

import pytest

from teamtr_lora.common.settings import nearest
from teamtr_lora.recipe.words import own_names

MEANT = {
    "lerning_rate": "learning_rate",
    "learing_raet": "learning_rate",  # two slips
    "learningrate": "learning_rate",
    "learning-rate": "learning_rate",
    "Learning_Rate": "learning_rate",
    "learn_rate": "learning_rate",
    "rate_learning": "learning_rate",
    "item_per_stages": "items_per_stage",
    "stage_per_items": "items_per_stage",
    "minibatch_per_epoch": "minibatches_per_epoch",
    "temprature": "temperature",
    "temp": "temperature",
    "tepmerature": "temperature",
    "sead": "seed",
    "sede": "seed",
    "dleta": "delta",
    "tracker": "trackers",
    "stagse": "stages",
    "message_tokens": "max_message_tokens",
    "grad_norm": "max_grad_norm",
    "quant": "quantization",
    "rnak": "rank",
}
# Nearest to nothing of ours, though each shares many letters with some name: what a looser rule proposed stands beside it.
UNRELATED = {
    "rope_scalings": "resampling",
    "router_aux_loss": "own_answer_share",
    "data_use": "database",
    "batch_eval_metrics": "advantage_eps",
    "megatron_core": "learning_rate",
    "world_size": "align_rate",
    "hidden_size": "minibatches_per_epoch",
    "num_layers": "numbers",
    "momentum": "matched",
    "port": "router",
    "critic_learning_rate": "learning_rate",
    "judge_temperature": "temperature",
    "tokenizer_revision": "revision",
    "top_n": "top_k",  # or top_p
    "tokens": "max_message_tokens",  # or tokens_per_microbatch
    "x": "r",
    "": "seed",
}


@pytest.mark.parametrize("word", MEANT)
def test_a_slip_leads_to_the_name_that_was_meant(word: str) -> None:
    assert nearest(word, own_names()) == MEANT[word]


@pytest.mark.parametrize("word", UNRELATED)
def test_a_name_that_is_only_like_one_of_ours_leads_nowhere(word: str) -> None:
    assert nearest(word, own_names()) is None


def test_names_that_are_merely_alike_are_not_each_others_slips() -> None:
    assert nearest("helper", ["checker", "solver"]) is None and nearest("scanner", ["planner"]) is None
    assert nearest("planer", ["planner", "solver"]) == "planner"
    assert nearest("evaluate", ["eval", "train"]) == "eval" and nearest("robin", ["round_robin", "sequence"]) == "round_robin"
    assert nearest("quikstart.yaml", ["quickstart.yaml", "nano.yaml"]) == "quickstart.yaml"


def test_very_long_names_take_no_time() -> None:
    assert nearest("a" * 100_000, ["a" * 99_999 + "b" + "c" * k for k in range(100)]) == "a" * 99_999 + "b"
