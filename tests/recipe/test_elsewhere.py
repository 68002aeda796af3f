"""Names from other libraries lead to the right key, or to the reason why there is none."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora import Recipe, RecipeError, TeamTRConfig, UserError
from teamtr_lora.cli import main
from teamtr_lora.common.program import in_a_script
from teamtr_lora.recipe import problems
from teamtr_lora.recipe.elsewhere import NAMES
from teamtr_lora.recipe.reference import recipe_keys
from teamtr_lora.recipe.words import in_their_words, of_a_script, own_names

KEYS = {key.name for key in recipe_keys() if key.takes}
# What a name of each library means here, written down once more and by hand: the table may not drift away from it.
MEANT = {
    "per_device_train_batch_size": "training.tokens_per_microbatch",
    "lora_r": "team.agents.*.lora.rank",
    "target_modules": "team.agents.*.lora.targets",
    "num_train_epochs": "training.stages",
    "warmup_ratio": None,
    "run_dir": "output_dir",
    "load_in_4bit": "base.quantization",
    "eval_steps": "evaluation.every_stages",
    "save_steps": None,
    "deepspeed": "training.shard",
    "model_name_or_path": "base.source",
    "beta": "trust_region.beta_initial",
    "target_kl": "trust_region.delta",
    "num_generations": "rollout.episodes_per_item",
    "max_completion_length": "rollout.max_message_tokens",
    "max_prompt_length": "team.protocol.context_tokens",
    "epsilon": "training.clip_ratio",
    "num_iterations": "training.inner_epochs",
    "ppo_mini_batch_size": "training.minibatches_per_epoch",
    "train_files": "task.path",
    "gpu_memory_utilization": "rollout.vllm.memory_share",
    "tensor_model_parallel_size": "rollout.vllm.tensor_parallel",
    "adv_estimator": "training.advantage",
    "finetuning_type": None,
    "cutoff_len": "team.protocol.context_tokens",
    "val_size": "task.test_fraction",
    "quantization_bit": "base.quantization",
    "lora_dropout": None,
    "reward_model": None,
    "model": "base.source",
    "steps_per_generation": "training.minibatches_per_epoch",
    "init_lora_weights": None,
    "enable_thinking": "team.protocol.reasoning_tags",
    "chat_template_kwargs": None,
    "dataloader_num_workers": None,
    "exclude_modules": "team.agents.*.lora.targets",
    "base_model_name_or_path": "base.source",
    "vllm_importance_sampling_clip_max": "rollout.importance_cap",
    "optimizer_offload": "training.optimizer",
    "steps": "training.stages",
    "lr_schedule": "training.schedule",
    "scheduler": "training.schedule",
    "max_tokens": "rollout.max_message_tokens",
    "n_samples_per_prompt": "rollout.episodes_per_item",
    "rollout_batch_size": "rollout.items_per_stage",
    "critic_lr": None,
    "sapo_temperature_pos": None,
}


def test_there_are_at_least_eighty_and_each_leads_to_a_key_or_a_reason() -> None:
    assert len(NAMES) >= 80 and {name: NAMES[name].key for name in MEANT} == MEANT
    for name, found in NAMES.items():
        assert found.key in KEYS if found.key else found.note, name
        assert set(re.findall(r"\{(.*?)\}", found.note)) <= KEYS, name
        assert "{" not in found.words(str) and not found.words(str).endswith("."), name


@pytest.mark.parametrize("config", ["trl.GRPOConfig", "peft.LoraConfig"])
def test_every_field_of_their_configs_is_known(config: str) -> None:
    """GRPOConfig's fields are TrainingArguments' too."""
    library, name = config.split(".")
    fields = {field.name for field in dataclasses.fields(getattr(pytest.importorskip(library), name))}
    assert len(fields) > 30 and {field for field in fields if field not in NAMES and field not in own_names()} == set()
    same = {field for field in fields if field in own_names()}
    assert same <= {"learning_rate", "weight_decay", "max_grad_norm", "gradient_checkpointing", "run_name", "project", "seed",
                    "output_dir", "temperature", "top_p", "top_k", "revision", "delta"}  # fmt: skip


def test_a_name_of_ours_is_never_taken_for_another_librarys() -> None:
    assert {name for name in NAMES if not own_names().get(name, "task.").startswith("task.")} == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_hint_is_in_the_one_line_of_a_recipe_and_of_a_script(name: str) -> None:
    found = NAMES[name]
    for section in ("training", None):
        data = {"team": {"agents": [{"name": "a"}]}} | ({section: {name: 1}} if section else {name: 1})
        (problem,) = problems(data)
        line = str(problem)
        assert line.startswith(f"{section}.{name}" if section else name) and "unknown key" in line
        if section and name == "stage":  # a key of the section itself but for its plural
            assert line == "training.stage = 1: unknown key; did you mean 'stages'?"
            continue
        assert found.words(str) in line
        assert f"did you mean {found.key!r}?" in line if found.key else "did you mean" not in line
    with pytest.raises(RecipeError) as caught:
        TeamTRConfig(**{name: 1})
    line = str(caught.value)
    if found.key is None:
        assert "unknown key; " in line and "did you mean" not in line
    elif found.key.startswith(("base.", "team.")):
        assert f"give {found.key.removeprefix('team.')} to TeamSpec" in line
    elif found.key.startswith("task."):
        assert re.search("give (reward_funcs|train_dataset|eval_dataset) to TeamTRTrainer", line)
    else:
        assert f"did you mean {in_a_script(found.key)!r}?" in line


def test_the_right_name_in_the_wrong_section_leads_to_what_all_recipes_have() -> None:
    (problem,) = problems({"team": {"agents": [{"name": "a"}]}, "training": {"temperature": 0.7}})
    assert "did you mean 'rollout.temperature'?" in str(problem)


def test_keys_finds_names_from_elsewhere_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert [key.name for key in recipe_keys("wandb")] == ["tracking.trackers"]
    assert [key.name for key in recipe_keys("lora_r")] == ["team.agents.*.lora.rank"]
    assert [key.name for key in recipe_keys("num_train_epochs")] == ["training.stages"]
    with pytest.raises(UserError, match="warmup_ratio: there is no such key here: there is no warm-up"):
        recipe_keys("warmup_ratio")
    assert main(["keys", "wandb"]) == 0 and "tracking.trackers" in capsys.readouterr().out


def test_validate_finds_a_tracker_that_is_not_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("team: {agents: [{name: a}]}\ntracking: {trackers: [tensorboard, wandb]}\n")
    assert main(["validate", str(tmp_path / "r.yaml")]) == 2
    assert 'tracking.trackers = ["wandb"]: wandb is not installed; pip install wandb, or leave it out' in capsys.readouterr().err


def test_rules_between_settings_of_a_script_name_them_as_the_script_does() -> None:
    tries: list[tuple[dict[str, Any], str]] = [
        ({"delta": -1}, "delta = -1: must"),
        ({"items_per_stage": 5, "holdout": 0.1}, "use items_per_stage >= 15, or holdout = 0.4"),
        ({"vllm": {"memory_share": 3}}, "vllm['memory_share'] = 3: must"),
        ({"engine": "vllm_server"}, "server={'urls': ['http://localhost:8000']}"),
        ({"top_p": 0.5}, "set top_p to 1.0"),
    ]
    for given, said in tries:
        with pytest.raises(RecipeError) as caught:
            TeamTRConfig(**given)
        assert said in str(caught.value) and not re.search(r"\b(rollout|training|trust_region)\.", str(caught.value))
    assert of_a_script("set training.gradient_checkpointing=true; see base.source, recipe.yaml") == (
        "set gradient_checkpointing=True; see base.source, recipe.yaml"
    )


def test_errors_while_training_name_keys_as_their_user_writes_them() -> None:
    recipe = Recipe.model_validate({"team": {"agents": [{"name": "a"}]}})
    for given, said in ((recipe, "trust_region.delta = 1: no"), (recipe.model_copy().of_a_script(), "delta = 1: no")):
        with pytest.raises(UserError) as caught, in_their_words(given):
            raise UserError("trust_region.delta = 1: no")
        assert str(caught.value) == said
