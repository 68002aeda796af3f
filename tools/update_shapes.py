"""What the benchmarks of updates share: a base of random weights, the work of an update as a recipe, and its options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

MODEL_SHAPES = {
    "qwen3-1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3-8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False},
    "smollm2-135m": {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
                     "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True},
}  # fmt: skip


def random_base(shape: str, device: str) -> Path:
    """Random weights of a known size, with the embedded base's tokenizer: for speed, not for sense. The folder is kept, since
    vLLM keeps what it has compiled for a base by its path."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    from teamtr_lora.base.source import cache_root, resolve

    folder = cache_root() / "random" / shape
    if (folder / "tokenizer.json").exists():
        return folder
    config = Qwen3Config(**MODEL_SHAPES[shape], max_position_embeddings=8192)
    torch.set_default_dtype(torch.float16)
    with torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the processes that measure need the memory
    AutoTokenizer.from_pretrained(resolve("nano")).save_pretrained(folder)
    return folder


def add_update_options(parser: argparse.ArgumentParser, *, memory_share: float) -> None:
    """The work of one update."""
    parser.add_argument("--base", default="nano", help="as base.source in a recipe, or random:SHAPE")
    parser.add_argument("--engine", default="transformers", choices=("transformers", "vllm"))
    parser.add_argument("--memory-share", type=float, default=memory_share, help="vLLM's part of the GPU")
    parser.add_argument("--prompts", type=int, default=4, help="groups to learn from in an update")
    parser.add_argument("--group", type=int, default=4, help="episodes a prompt")
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--message-tokens", type=int, default=12)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-7)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="further settings of ours")


def update_recipe(args: argparse.Namespace, *, agents: int, prompts: int, tokens: int, **training: Any) -> dict[str, Any]:
    """A team of `agents` that learns from `prompts` items and is judged on a quarter more, as a recipe's sections. Its region is
    so wide that no pass is left out: the work is what is measured. The gate reads one length, as it does in three of four
    updates of real runs; in so wide a region it would stretch every step. Its measured gain, which is noise here, refuses none:
    every update is also stored and published."""
    items = prompts + max(2, prompts // 4)
    return {
        "base": {"source": args.base},
        "task": {"name": "arithmetic"},  # any that a team of any size can play: the benchmarks bring their own items
        "team": {
            "agents": [{"name": f"a{i}", "lora": {"rank": args.rank, "alpha": 2 * args.rank}} for i in range(agents)],
            "router": {"kind": "round_robin", "rounds": 1},
        },
        "rollout": {
            "engine": args.engine,
            "items_per_stage": items,
            "episodes_per_item": args.group,
            "max_message_tokens": tokens,
            "requests_per_batch": min(512, items * args.group),
            "vllm": {"memory_share": args.memory_share},
        },
        "training": {"inner_epochs": args.passes, "learning_rate": args.learning_rate, **training},
        "trust_region": {"delta": 10.0, "holdout": 1 - prompts / items, "step": "shrink", "gain": "none"},
    }
