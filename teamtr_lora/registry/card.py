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

from teamtr_lora.base.lora_config import read_lora_config
from teamtr_lora.base.source import HUB_ID, NANO
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe.yaml_text import write
from teamtr_lora.registry.manifest import BaseIdentity, TeamManifest

_VLLM_DEFAULT_RANK = 16
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_RESOLVE = "import sys; from teamtr_lora.base.source import resolve; print(resolve(sys.argv[1]))"


def code(value: object) -> str:
    """A value as a code span: on one line, and unable to end the span or a table's cell."""
    text = "".join(c if c.isprintable() else " " for c in str(value)).replace("`", "'").replace("|", "/").strip()
    return f"`{text[:300]}`" if text else "-"


def adapter_card(
    manifest: Mapping[str, Any], config: Mapping[str, Any], task: str = "", *, licence: str = "", location: str = ""
) -> str:
    """The card of one version. `manifest` holds AdapterManifest's fields; `location`: a hub id, if not the default registry."""
    base: BaseIdentity = manifest["base"]
    agent, lora = manifest["agent"], read_lora_config(config, "card")
    where = location or f"adapters/{manifest['team']}/{agent}/{manifest['version']}"
    kind = "DoRA" if lora.dora else "rsLoRA" if lora.rslora else "LoRA"
    lines = [
        front_matter(base, licence, task),
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


def front_matter(base: BaseIdentity, licence: str, task: str) -> str:
    if licence and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]{0,63}", licence):
        raise UserError(f"licence {licence[:80]!r}: must be an identifier such as apache-2.0, mit or other")
    data: dict[str, Any] = {"library_name": "peft", "license": licence or ("apache-2.0" if base.source == NANO else "other")}
    if base.source == NANO or _is_hub(base.source):  # a folder on somebody's machine is no model of the hub
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
    if _is_hub(base.source):
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
    if dora:
        return ["vLLM does not serve DoRA adapters: use PEFT or teamtr-lora's transformers engine.", ""]
    source = shlex.quote(base.source)
    if not _is_hub(base.source):
        source = f'"$(python -c {shlex.quote(_RESOLVE)} {source})"'
    words = ["vllm serve", source, f"--revision {shlex.quote(base.revision)}" if base.revision else "", "--enable-lora"]
    if rank > _VLLM_DEFAULT_RANK:
        words.append(f"--max-lora-rank {next(size for size in _VLLM_RANKS if size >= rank)}")
    modules = " ".join(shlex.quote(f"{agent}={path}") for agent, path in where.items())
    return ["With vLLM:", "", "```bash", " ".join(word for word in [*words, f"--lora-modules {modules}"] if word), "```", ""]


def _is_hub(source: str) -> bool:
    return HUB_ID.fullmatch(source) is not None


def _text(value: str | None) -> str:
    return json.dumps(value)  # JSON text is a Python literal too, and escapes line breaks
