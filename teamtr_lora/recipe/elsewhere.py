"""What TRL, transformers, PEFT, verl and LLaMA-Factory call things: our key for it, or why there is none.

A name that means the same under the same name (learning_rate, temperature, ...) needs no line here. In notes, {key} is a key of
ours, which is shown as its reader writes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Elsewhere:
    """`key`: ours of that meaning; None: there is none, and `note` says why. A note with a key says what differs."""

    key: str | None
    note: str = ""

    def words(self, written: Callable[[str], str]) -> str:
        return re.sub(r"\{([\w.*]+)\}", lambda match: written(match[1]), self.note)


_EACH_AGENT = "each agent has its own"
_STAGES = "counts stages: in each, every agent is updated once on {rollout.items_per_stage} items"
_TOKENS = "counts tokens, for memory; an update learns from {rollout.items_per_stage} times {rollout.episodes_per_item} episodes"
_EVERY_UPDATE = "every update is checkpointed, always"
_NO_WARM_UP = "there is no warm-up: the trust region holds the first steps back"
_ADAM = "AdamW's betas and epsilon are torch's defaults"
_NO_REFERENCE = "the KL is from the agent as it was before the update; there is no reference model"
_NO_CRITIC = "there is no value model: advantages come from the episodes of one item"
_LAUNCHED = "not a setting: all GPUs are used; `train --gpus N` takes fewer, torchrun starts several hosts"
_SPLIT = "always, never or auto: the frozen base is all that is split"
_WHOLE_SOFTMAX = "the policy is the plain softmax at {rollout.temperature}; anything else would bias the update"
_LORA_ONLY = "an agent is a LoRA adapter and nothing else of the base is trained"
_OWN_TEMPLATE = "the base's own chat template is used"
_NO_DROPOUT = "dropout would make the trained policy another than the sampled one"
_MIXED = "of the whole base: fp32, fp16, bf16 or auto"
_FOUR_BITS = "write 4bit"
_TRANSCRIPT = "of the whole transcript, prompt and messages together"
_ORDER = "the order of the items follows from {seed}"
_SUM = "rewards are summed; weight them inside the functions"
_ROWS = "all rows are used; leave out what should not be"
_LOGGED = "every update and every stage is logged in the run's metrics.jsonl"
_HUB = "after the run: teamtr-lora push"
_KERNELS = "transformers and the engine choose their own kernels and caches"
_PEFT = "PEFT keeps it itself"
_FROM_ZERO = "an adapter begins by changing nothing: the untrained team is the base"
_KINDS = "adapters are LoRA, with {team.agents.*.lora.rslora} or {team.agents.*.lora.dora}"
_ONE_RANK = "an adapter has one rank and one alpha in all its layers"
_LOSS = "the loss is the clipped surrogate, a mean over messages; {training.ratio} is its unit"
_NO_BONUS = "there is no entropy bonus"
_NO_LOADER = "there is no data loader: items are dealt to the engine as it plays"
_PACKED = "how rows lie in a micro-batch is the program's own choice"
_COMMANDS = "not a setting: `train` and `eval` are commands, in Python train() and evaluate()"
_METRICS = "an evaluation's numbers are always the same: accuracy, pass@k, mean reward"
_VERL = "a section of verl: its keys go by their own names, such as lr, kl_coef, ppo_epochs, n or train_files"

NAMES: dict[str, Elsewhere] = {
    # the base
    **dict.fromkeys(("model_name_or_path", "model_name", "model", "model_path", "pretrained_model_name_or_path",
                     "base_model_name_or_path"), Elsewhere("base.source")),
    "model_revision": Elsewhere("base.revision"),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "dtype", "bnb_4bit_compute_dtype", "mixed_precision", "pure_bf16",
                     "bf16_full_eval", "fp16_full_eval", "cast_lm_head_to_fp32"),
                    Elsewhere("base.precision", _MIXED)),
    "load_in_4bit": Elsewhere("base.quantization", _FOUR_BITS),
    "load_in_8bit": Elsewhere("base.quantization", "write 8bit"),
    "quantization_bit": Elsewhere("base.quantization", "write 4bit or 8bit"),
    **dict.fromkeys(("device_map", "use_cpu", "no_cuda"), Elsewhere("base.device", "one device holds the whole base")),
    "trust_remote_code": Elsewhere(None, "code of a model folder is never run"),
    **dict.fromkeys(("attn_implementation", "flash_attn", "use_flash_attention_2", "use_liger_kernel", "liger_kernel_config",
                     "cache_implementation", "use_cache", "vllm_model_impl"), Elsewhere(None, _KERNELS)),
    "model_init_kwargs": Elsewhere(None, "a base has {base.precision}, {base.quantization}, {base.device} and {base.revision}"),
    "router_aux_loss_coef": Elsewhere(None, "the base is frozen, with its experts and their router"),
    # adapters
    **dict.fromkeys(("lora_r", "r", "lora_rank"), Elsewhere("team.agents.*.lora.rank", _EACH_AGENT)),
    "lora_alpha": Elsewhere("team.agents.*.lora.alpha", _EACH_AGENT),
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora_target"),
                    Elsewhere("team.agents.*.lora.targets", f"{_EACH_AGENT}: all-linear or a list")),
    **dict.fromkeys(("exclude_modules", "layers_to_transform", "layers_pattern"),
                    Elsewhere("team.agents.*.lora.targets", "names what carries the adapter, in every layer; no exceptions")),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), Elsewhere(None, _ONE_RANK)),
    **dict.fromkeys(("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "pissa_init"),
                    Elsewhere(None, _FROM_ZERO)),
    **dict.fromkeys(("velora_config", "alora_invocation_tokens", "use_qalora", "qalora_group_size", "monteclora_config",
                     "layer_replication", "use_bdlora", "arrow_config", "kasa_config"), Elsewhere(None, _KINDS)),
    **dict.fromkeys(("auto_mapping", "peft_version", "inference_mode", "fan_in_fan_out", "megatron_config", "megatron_core",
                     "runtime_config"), Elsewhere(None, _PEFT)),
    **dict.fromkeys(("use_rslora", "lora_use_rslora"), Elsewhere("team.agents.*.lora.rslora", _EACH_AGENT)),
    **dict.fromkeys(("use_dora", "lora_use_dora"), Elsewhere("team.agents.*.lora.dora", _EACH_AGENT)),
    **dict.fromkeys(("lora_dropout", "disable_dropout"), Elsewhere(None, _NO_DROPOUT)),
    "neftune_noise_alpha": Elsewhere(None, "noise would make the trained policy another than the sampled one"),
    **dict.fromkeys(("modules_to_save", "lora_modules_to_save", "use_peft", "finetuning_type", "peft_type", "bias", "lora_bias",
                     "task_type", "lora_task_type", "additional_target", "trainable_token_indices", "target_parameters",
                     "ensure_weight_tying", "full_finetuning"), Elsewhere(None, _LORA_ONLY)),
    "adapter_name_or_path": Elsewhere(None, "to go on from adapters: `train RUN --resume`, in Python TeamTRTrainer(team=RUN)"),
    # how long
    **dict.fromkeys(("num_train_epochs", "max_steps", "total_epochs", "total_training_steps", "num_epochs", "total_episodes",
                     "epochs", "steps", "total_steps", "max_epochs"), Elsewhere("training.stages", _STAGES)),
    "stage": Elsewhere("training.stages", "counts stages; the kind of training is no choice: it is TeamTR's"),
    **dict.fromkeys(("num_iterations", "ppo_epochs", "num_ppo_epochs"), Elsewhere("training.inner_epochs")),
    # batches
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "ppo_micro_batch_size_per_gpu",
                     "gradient_accumulation_steps", "ppo_max_token_len_per_gpu", "batch_size", "auto_find_batch_size",
                     "use_dynamic_bsz", "micro_train_batch_size"),
                    Elsewhere("training.tokens_per_microbatch", _TOKENS)),
    **dict.fromkeys(("train_batch_size", "generation_batch_size", "rollout_batch_size"),
                    Elsewhere("rollout.items_per_stage", "counts prompts; each is played {rollout.episodes_per_item} times")),
    **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches", "steps_per_generation"),
                    Elsewhere("training.minibatches_per_epoch", "counts optimizer steps per pass, not rows")),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "micro_rollout_batch_size", "log_prob_micro_batch_size"),
                    Elsewhere("rollout.requests_per_batch", "what an engine samples together, in evaluations and in training")),
    **dict.fromkeys(("num_generations", "rollout_n", "num_return_sequences", "n", "group_size", "n_samples_per_prompt"),
                    Elsewhere("rollout.episodes_per_item")),
    "num_generations_eval": Elsewhere("evaluation.samples_per_item"),
    # lengths
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "max_tokens", "max_response_length", "response_length"),
                    Elsewhere("rollout.max_message_tokens")),
    **dict.fromkeys(("max_prompt_length", "cutoff_len", "max_seq_length", "max_length", "max_model_len", "vllm_max_model_length",
                     "model_max_length"), Elsewhere("team.protocol.context_tokens", _TRANSCRIPT)),
    "rope_scaling": Elsewhere(None, "the base's own config.json says how far its positions reach"),
    # the optimizer
    **dict.fromkeys(("lr", "actor_lr", "actor_learning_rate"), Elsewhere("training.learning_rate")),
    **dict.fromkeys(("loraplus_lr_ratio", "loraplus_lr_embedding"), Elsewhere(None, "{training.learning_rate} is one for all")),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "lr_schedule", "learning_rate_schedule", "learning_rate_scheduler",
                     "scheduler"), Elsewhere("training.schedule")),
    "lr_scheduler_kwargs": Elsewhere("training.schedule", "has no settings"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "lr_warmup_steps"), Elsewhere(None, _NO_WARM_UP)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "betas"), Elsewhere(None, _ADAM)),
    "optim": Elsewhere("training.optimizer"),
    "optim_target_modules": Elsewhere(None, "{training.optimizer} is that of every weight of an adapter"),
    **dict.fromkeys(("grad_clip", "clip_grad"), Elsewhere("training.max_grad_norm")),
    "gradient_checkpointing_kwargs": Elsewhere("training.gradient_checkpointing", "on or off, no more"),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), Elsewhere("training.compile", "on or off")),
    "tf32": Elsewhere("trust_region.gate_precision", "of the gate's passes: auto, fp32 or tf32"),
    # the objective
    **dict.fromkeys(("beta", "kl_coef", "init_kl_coef", "kl_loss_coef", "use_kl_loss"),
                    Elsewhere("trust_region.beta_initial", f"{_NO_REFERENCE}, and {{trust_region.delta}} bounds it")),
    "target_kl": Elsewhere("trust_region.delta", "in nats per message, as {trust_region.reduction} says"),
    **dict.fromkeys(("kl_penalty", "kl_loss_type", "kl_estimator"), Elsewhere("trust_region.estimator", "exact, k3 or k1")),
    **dict.fromkeys(("ref_model", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "use_kl_in_reward"),
                    Elsewhere(None, _NO_REFERENCE)),
    **dict.fromkeys(("epsilon", "cliprange", "clip_range", "clip_eps", "clip_ratio_low"), Elsewhere("training.clip_ratio")),
    "epsilon_high": Elsewhere("training.clip_ratio_high"),
    "gamma": Elsewhere("training.discount", "per message"),
    **dict.fromkeys(("lam", "gae_lambda", "vf_coef", "cliprange_value", "value_model", "critic_lr", "critic_learning_rate"),
                    Elsewhere(None, _NO_CRITIC)),
    **dict.fromkeys(("adv_estimator", "scale_rewards", "norm_adv_by_std_in_grpo"),
                    Elsewhere("training.advantage", "group, no_norm, no_clip or leave_one_out")),
    "importance_sampling_level": Elsewhere("training.ratio", "message, token or sequence_mean"),
    **dict.fromkeys(("loss_type", "loss_agg_mode", "sapo_temperature_neg", "sapo_temperature_pos", "vespo_k_pos", "vespo_k_neg",
                     "vespo_lambda_pos", "vespo_lambda_neg", "label_smoothing_factor", "average_tokens_across_devices"),
                    Elsewhere(None, _LOSS)),
    **dict.fromkeys(("entropy_coeff", "entropy_coef", "ent_coef", "use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
                     "entropy_coef_delta", "entropy_target"), Elsewhere(None, _NO_BONUS)),
    "top_entropy_quantile": Elsewhere(None, "every token of a message counts"),
    "off_policy_mask_threshold": Elsewhere(None, "no episode is masked; {trust_region.delta} bounds the update as a whole"),
    "use_bias_correction_kl": Elsewhere(None, "the KL is summed over the vocabulary ({trust_region.estimator}), without bias"),
    "mask_truncated_completions": Elsewhere("rollout.truncated_messages", "write mask"),
    # rewards
    **dict.fromkeys(("reward_funcs", "custom_reward_function", "reward_fn"),
                    Elsewhere("task.reward", "module:function, in a file beside the recipe")),
    "reward_model": Elsewhere(None, "a reward is a Python function: call the model in one, and name it in {task.reward}"),
    **dict.fromkeys(("reward_weights", "multi_objective_aggregation"), Elsewhere(None, _SUM)),
    # sampling
    "use_vllm": Elsewhere("rollout.engine", "write vllm"),
    "vllm_mode": Elsewhere("rollout.engine", "vllm is colocated, vllm_server is for servers"),
    **dict.fromkeys(("vllm_gpu_memory_utilization", "gpu_memory_utilization"), Elsewhere("rollout.vllm.memory_share")),
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host", "vllm_server_port"),
                    Elsewhere("rollout.server.urls", "a list of addresses such as http://host:8000")),
    "vllm_server_timeout": Elsewhere("rollout.server.timeout_seconds", "for one answer"),
    **dict.fromkeys(("tensor_parallel_size", "vllm_tensor_parallel_size", "tensor_model_parallel_size"),
                    Elsewhere("rollout.vllm.tensor_parallel")),
    "enforce_eager": Elsewhere("rollout.vllm.cuda_graphs", "the opposite: true uses graphs"),
    **dict.fromkeys(("vllm_enable_sleep_mode", "free_cache_engine"), Elsewhere("rollout.vllm.offload", "auto, never or always")),
    "vllm_group_port": Elsewhere(None, "servers take adapters at the same address as requests: {rollout.server.urls}"),
    **dict.fromkeys(("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
                    Elsewhere(None, "every engine fills its batches itself, up to {rollout.requests_per_batch}")),
    **dict.fromkeys(("vllm_importance_sampling_correction", "vllm_importance_sampling_cap", "vllm_importance_sampling_mode",
                     "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"),
                    Elsewhere("rollout.importance_cap", "a number is the cap; null uses no such weights")),
    **dict.fromkeys(("min_p", "repetition_penalty", "generation_kwargs", "do_sample", "vllm_structured_outputs_regex"),
                    Elsewhere(None, _WHOLE_SOFTMAX)),
    "max_tool_calling_iterations": Elsewhere(None, "a task answers tool calls; {team.router.rounds} says how often agents speak"),
    # data
    **dict.fromkeys(("dataset_name", "hub_dataset"), Elsewhere("task.hub", "with task.name: dataset")),
    **dict.fromkeys(("dataset", "train_files", "dataset_dir", "train_dataset", "train_file"),
                    Elsewhere("task.path", "one file, with task.name: dataset")),
    **dict.fromkeys(("val_files", "eval_dataset", "validation_file"), Elsewhere("task.test_path", "one file")),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), Elsewhere("task.hub_config")),
    "dataset_train_split": Elsewhere("task.train_split"),
    "dataset_test_split": Elsewhere("task.test_split"),
    **dict.fromkeys(("val_size", "test_size"), Elsewhere("task.test_fraction")),
    **dict.fromkeys(("prompt_key", "dataset_text_field"), Elsewhere("task.prompt_column")),
    **dict.fromkeys(("max_samples", "max_train_samples"), Elsewhere(None, _ROWS)),
    **dict.fromkeys(("shuffle", "shuffle_dataset", "data_seed"), Elsewhere(None, _ORDER)),
    **dict.fromkeys(("random_state", "full_determinism"), Elsewhere("seed", "a run's draws all follow from it")),
    "system_prompt": Elsewhere("team.protocol.system"),
    **dict.fromkeys(("template", "chat_template", "chat_template_path", "chat_template_kwargs"), Elsewhere(None, _OWN_TEMPLATE)),
    "enable_thinking": Elsewhere("team.protocol.reasoning_tags", "keep lets the base think, strip does not"),
    **dict.fromkeys(("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
                     "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "num_workers",
                     "preprocessing_num_workers", "overwrite_cache", "ignore_data_skip"), Elsewhere(None, _NO_LOADER)),
    **dict.fromkeys(("packing", "neat_packing", "pad_to_multiple_of", "train_sampling_strategy", "length_column_name",
                     "group_by_length"), Elsewhere(None, _PACKED)),
    "label_names": Elsewhere(None, "there are no labels: episodes are rewarded"),
    "remove_unused_columns": Elsewhere(None, "every column reaches the reward function by its name"),
    # what is kept and told
    **dict.fromkeys(("report_to", "logger"), Elsewhere("tracking.trackers", "a list: tensorboard, wandb, trackio")),
    **dict.fromkeys(("project_name", "wandb_project"), Elsewhere("tracking.project")),
    **dict.fromkeys(("experiment_name", "wandb_run_name"), Elsewhere("tracking.run_name")),
    **dict.fromkeys(("logging_steps", "logging_strategy", "logging_dir", "logging_first_step", "log_on_each_node",
                     "logging_nan_inf_filter", "include_num_input_tokens_seen", "skip_memory_metrics", "plot_loss"),
                    Elsewhere(None, f"{_LOGGED}; `teamtr-lora report` draws it")),
    **dict.fromkeys(("log_level", "log_level_replica", "debug"),
                    Elsewhere(None, "not a setting: Python's logging, under the name teamtr_lora")),
    **dict.fromkeys(("log_completions", "num_completions_to_print", "log_unique_prompts"),
                    Elsewhere("diagnostics.save_episodes", "all, none or how many of each update")),
    **dict.fromkeys(("eval_steps", "eval_strategy", "evaluation_strategy", "test_freq", "do_eval"),
                    Elsewhere("evaluation.every_stages", "counts stages; 0 evaluates before and after the run only")),
    "log_multimodal": Elsewhere(None, "messages are text"),
    "log_completions_hub_repo": Elsewhere(None, "transcripts stay in the run's folder episodes"),
    **dict.fromkeys(("eval_on_start", "val_before_train"), Elsewhere(None, "a run always begins with an evaluation")),
    "eval_delay": Elsewhere(None, "{evaluation.every_stages} counts from the first stage"),
    **dict.fromkeys(("prediction_loss_only", "include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches",
                     "eval_use_gather_object", "eval_accumulation_steps"), Elsewhere(None, _METRICS)),
    **dict.fromkeys(("do_train", "do_predict"), Elsewhere(None, _COMMANDS)),
    **dict.fromkeys(("save_steps", "save_strategy", "save_freq", "save_total_limit", "save_only_model",
                     "save_on_each_node", "enable_jit_checkpoint"), Elsewhere(None, _EVERY_UPDATE)),
    "restore_callback_states_from_checkpoint": Elsewhere(None, "a callback keeps its own state"),
    "resume_from_checkpoint": Elsewhere(None, "not a setting: `train RUN --resume`, in Python train(resume=True)"),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
                    Elsewhere(None, "every version of every agent stays in the run's folder adapters")),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy", "hub_always_push",
                     "hub_revision"), Elsewhere(None, _HUB)),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
                    Elsewhere(None, "a tracker gets {tracking.project}, {tracking.run_name}, {tracking.group}, {tracking.tags}")),
    **dict.fromkeys(("run_dir", "default_local_dir"), Elsewhere("output_dir", "the run directory itself")),
    "overwrite_output_dir": Elsewhere(None, "a run never overwrites another; choose another {output_dir}"),
    "disable_tqdm": Elsewhere(None, "not a setting: progress=False of TeamTRTrainer; away from a terminal no bar is drawn"),
    # several processes
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config", "ds3_gather_for_generation"), Elsewhere("training.shard", _SPLIT)),
    **dict.fromkeys(("ddp_timeout", "n_gpus_per_node", "nnodes", "local_rank", "num_processes", "num_gpus", "ddp_backend",
                     "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph",
                     "accelerator_config", "parallelism_config"), Elsewhere(None, _LAUNCHED)),
    "param_offload": Elsewhere(None, "the base stays on the GPU; {training.shard} splits it, {base.quantization} shrinks it"),
    "optimizer_offload": Elsewhere("training.optimizer", "paged_adamw_8bit moves its state to the CPU where memory is short"),
    "torch_empty_cache_steps": Elsewhere("rollout.vllm.offload", "when the engine gives its memory back: auto, never or always"),
    **dict.fromkeys(("actor_rollout_ref", "algorithm", "trainer", "critic", "data"), Elsewhere(None, _VERL)),
}  # fmt: skip
