"""The examples under every --help, by command; the first list stands under the program's own."""

from __future__ import annotations

_EXAMPLES = {
    "": [
        "train recipes/quickstart.yaml",
        "eval runs/quickstart --k 4",
        'ask runs/quickstart "347+285"',
        "report runs/quickstart",
        "view",
        "init my-team",
        "serve runs/quickstart --port 8000",
        "docs getting_started",
    ],
    "train": [
        "train recipes/quickstart.yaml",
        "train recipes/bases/nano.yaml recipes/tasks/countdown.yaml training.stages=4 --run-dir runs/try",
        "train runs/try --resume",
    ],
    "validate": ["validate recipes/quickstart.yaml training.stages=4", "validate --schema > recipe.schema.json"],
    "keys": [
        "keys trust_region              # a section",
        "keys memory                    # wherever the word occurs",
        "keys lora_r                    # what TRL, PEFT and others call it",
    ],
    "plan": [
        "plan recipes/quickstart.yaml rollout.items_per_stage=64",
        "plan recipes/quickstart.yaml --calibrate",
        "plan recipes/bases/qwen3_1.7b.yaml recipes/tasks/gsm8k.yaml --json",
    ],
    "init": ["init my-team"],
    "eval": [
        "eval runs/quickstart --k 4",
        "eval runs/quickstart --baseline cot --agent solver",
        "eval --compare runs/quickstart runs/try",
    ],
    "ask": ['ask runs/quickstart "347+285" --temperature 0', 'ask column_sum "347+285"              # a team of the registry'],
    "serve": ["serve runs/quickstart --port 8000", "serve recipes/quickstart.yaml --accept-adapters"],
    "report": ["report runs/quickstart", "report runs/quickstart runs/try --out compared.html"],
    "view": ["view", "view runs --port 9000"],
    "runs": ["runs", "runs my-runs --json"],
    "certify": ["certify runs/quickstart", "certify runs/quickstart --updates"],
    "diagnose": ["diagnose runs/quickstart"],
    "tasks": ["tasks list", "tasks show zebra", "tasks sample zebra houses=4 -n 2"],
    "score": [
        "tasks sample countdown --split test -n 100 --json > items.jsonl",
        "score countdown --items items.jsonl --responses responses.jsonl",
    ],
    "adapters": ["adapters list", "adapters import runs/quickstart --team my-team", "adapters show my-team"],
    "adapters list": ["adapters list --registry adapters"],
    "adapters show": ["adapters show my-team", "adapters show my-team --agent planner"],
    "adapters verify": ["adapters verify", "adapters verify runs/quickstart"],
    "adapters rm": ["adapters rm my-team --agent planner --version v0002-0123456789ab", "adapters rm my-team --all"],
    "adapters import": [
        "adapters import runs/quickstart --team my-team",
        "adapters import some/peft-folder --team my-team --agent planner",
    ],
    "push": ["push my-team --repo user/my-team --dry-run", "push my-team --repo user/my-planner --agent planner --private"],
    "pull": ["pull user/my-team", "pull user/my-team --name their-team"],
    "baseline": ["baseline grpo recipes/quickstart.yaml"],
    "swap": [
        "swap runs/quickstart --agent solver --with fresh:rank=32,targets=all-linear",
        "swap runs/quickstart --agent solver --with other-team/solver --dry-run",
        "swap runs/quickstart --undo",
    ],
    "rebase": ["rebase runs/qwen --to Qwen/Qwen3-4B"],
    "docs": ["docs", "docs trust_region"],
}


def examples(command: str = "") -> str:
    return "\n".join(["examples:" if len(_EXAMPLES[command]) > 1 else "example:", *lines(command)])


def lines(command: str = "") -> list[str]:
    return [f"  teamtr-lora {line}" for line in _EXAMPLES[command]]
