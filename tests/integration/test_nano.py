"""The embedded base: small, stock, able and imperfect; and vLLM serves it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from teamtr_lora.base.load import load_base
from teamtr_lora.base.source import resolve
from teamtr_lora.recipe import load_recipe
from teamtr_lora.training.trainer import TeamTRTrainer

ROOT = Path(__file__).resolve().parents[2]


def test_is_at_most_six_megabytes_and_a_stock_architecture() -> None:
    folder = resolve("nano")
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 6_000_000
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_the_untrained_team_is_right_between_30_and_60_percent_of_the_time() -> None:
    trainer = TeamTRTrainer.from_recipe(load_recipe(ROOT / "recipes" / "quickstart.yaml"))
    evaluation = trainer.evaluate(items=512, k=1)
    assert evaluation.temperature == 1.0
    assert 0.30 <= evaluation.avg_at_k <= 0.60
    assert evaluation.coordination is not None and evaluation.coordination.value == evaluation.avg_at_k


VLLM = """
import json, os, sys
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_NUM_OF_RESERVED_CPU="0", VLLM_CPU_KVCACHE_SPACE="1")
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=256, distributed_executor_backend="uni", enforce_eager=True, seed=0)
out = llm.generate({"prompt_token_ids": json.loads(sys.argv[2])}, SamplingParams(temperature=0, max_tokens=8))
print("tokens", json.dumps(list(out[0].outputs[0].token_ids)))
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed (tools/setup --all installs it)")
def test_vllm_serves_it_with_the_same_greedy_tokens() -> None:
    base = load_base("nano", device="cpu")
    prompt = base.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 3 plus 4?"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    expected = base.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)[0, len(prompt) :].tolist()
    ran = subprocess.run(
        [sys.executable, "-c", VLLM, str(base.folder), json.dumps(prompt)], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    served = json.loads(ran.stdout.rsplit("tokens", 1)[1])
    assert served == expected
