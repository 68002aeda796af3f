"""`teamtr-lora serve`: what it starts and refuses, and one real server from its start to its sudden end."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from forked import ForkedPython
from transformers import AutoTokenizer

import teamtr_lora
from teamtr_lora import TeamTRTrainer, ask_team
from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import load_base
from teamtr_lora.base.versions import read_version
from teamtr_lora.cli import main
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import RolloutSection, load_recipe
from teamtr_lora.rollout import serve
from teamtr_lora.rollout.sampler import Completion, Request, Sampler, SamplingParams, derive_seed
from teamtr_lora.rollout.serve import ServedTeam, ServeOptions, plan_launch
from teamtr_lora.rollout.transformers_engine import TransformersSampler
from teamtr_lora.rollout.vllm_server import ServerSampler
from teamtr_lora.runs.stored_run import read_run

RECIPE = Path(teamtr_lora.__file__).parent.parent / "recipes" / "quickstart.yaml"
SMALL = [
    "base.device=cpu", "training.stages=1", "training.inner_epochs=1", "rollout.items_per_stage=8", "rollout.episodes_per_item=2",
    "evaluation.items=4", "trust_region.delta=0.5",
]  # fmt: skip
AGENTS = ["planner", "solver", "checker"]
KEY = "open-sesame-99"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on the embedded base. Read only."""
    folder = tmp_path_factory.mktemp("serve") / "run"
    TeamTRTrainer.from_recipe(load_recipe(RECIPE, [*SMALL, f"output_dir={folder}"])).train()
    return folder


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


@pytest.fixture
def for_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever vLLM is installed here, or none."""
    monkeypatch.setattr(serve, "_is_cpu_build", lambda: True)


def stored(folder: Path) -> ServedTeam:
    run = read_run(folder)
    return ServedTeam(folder, run.recipe, run.versions, run.adapters)


def fresh(file: Path) -> ServedTeam:
    return ServedTeam(file, load_recipe(file))


def option(command: list[str], name: str, count: int = 1) -> list[str]:
    at = command.index(name)
    return command[at + 1 : at + 1 + count]


# --- what is started


def test_the_base_and_every_agent_are_served(team: Path, for_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    monkeypatch.setenv("TEAM_API_KEY", KEY)
    launch = plan_launch(stored(team), ServeOptions(port=8123, api_key_variable="TEAM_API_KEY"))
    command = launch.command
    versions = read_run(team).versions
    folders = [str((team / "adapters" / agent / versions[agent].name).resolve()) for agent in AGENTS]
    assert option(command, "--lora-modules", 3) == [
        f'{{"name": "{agent}", "path": "{folder}"}}' for agent, folder in zip(AGENTS, folders, strict=True)
    ]
    assert option(command, "--served-model-name") == ["nano"] and option(command, "--dtype") == ["float32"]
    assert option(command, "--max-loras") == ["4"] and option(command, "--max-lora-rank") == ["8"]
    assert option(command, "--logprobs-mode") == ["processed_logprobs"] and option(command, "--max-model-len") == ["1024"]
    assert option(command, "--host") == ["127.0.0.1"] and option(command, "--port") == ["8123"]
    middleware = [command[place + 1] for place, word in enumerate(command) if word == "--middleware"]
    assert middleware == [serve.TEAM_MODEL, f"{serve.MIDDLEWARE}RequireKey"] and "--trust-remote-code" not in command
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "False", "off, whatever the shell says"
    assert launch.environment["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(command) + launch.greeting, "other users can read a command line"
    assert "http://127.0.0.1:8123/v1/chat/completions" in launch.greeting and '"model": "team"' in launch.greeting
    assert "Bearer $TEAM_API_KEY" in launch.greeting


def test_a_recipe_can_wait_for_its_adapters(for_cpu: None) -> None:
    launch = plan_launch(fresh(RECIPE), ServeOptions(accept_adapters=True))
    assert "--lora-modules" not in launch.command and option(launch.command, "--max-loras") == ["5"]
    assert option(launch.command, "--middleware") == [f"{serve.MIDDLEWARE}AdapterUpload"]
    assert launch.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert "rollout.engine=vllm_server" in launch.greeting and "http://127.0.0.1:8000" in launch.greeting


@pytest.mark.parametrize("name", ["AdapterUpload", "RequireKey"])
def test_the_middleware_is_where_vllm_looks_for_it(name: str) -> None:
    assert isinstance(getattr(importlib.import_module(serve.MIDDLEWARE.removesuffix(".")), name), type)


def test_without_a_key_or_uploads_only_the_team_is_added(team: Path, for_cpu: None) -> None:
    launch = plan_launch(stored(team), ServeOptions())
    assert option(launch.command, "--middleware") == [serve.TEAM_MODEL] and launch.environment["VLLM_API_KEY"] == ""


def test_an_agent_called_like_the_base_keeps_its_name(team: Path, for_cpu: None, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("base: {source: nano}\nteam: {agents: [{name: nano, lora: {rank: 9}}]}\n")
    command = plan_launch(fresh(recipe), ServeOptions(accept_adapters=True)).command
    assert option(command, "--served-model-name") == ["nano-base"] and option(command, "--max-lora-rank") == ["16"]


@pytest.mark.parametrize(("visible", "given"), [(None, "1"), ("", "1"), ("2,3", "3"), ("GPU-a, GPU-b", "GPU-b")])
def test_a_gpu_is_the_nth_that_is_visible(monkeypatch: pytest.MonkeyPatch, visible: str | None, given: str) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert serve._environment({}, ServeOptions(device="cuda:1"), "")["CUDA_VISIBLE_DEVICES"] == given


def test_on_a_gpu_a_team_of_fp32_is_served_in_fp16(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(serve, "resolve_device", torch.device)
    told = []
    for precision, device in (("fp32", "cpu"), ("auto", "cuda"), ("bf16", "cuda"), ("fp32", "cuda")):
        told.append((serve._dtype(precision, device), "served in fp16" in caplog.text))
    assert told == [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False), (torch.float16, True)]


# --- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ServeOptions(api_key_variable="NOT_SET"), "NOT_SET is not set"),
        (ServeOptions(host="0.0.0.0", accept_adapters=True), "put an API key into VLLM_API_KEY"),
        (ServeOptions(device="cuda"), "built for CPUs"),
    ],
)
def test_unfit_options_are_refused(team: Path, for_cpu: None, options: ServeOptions, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_launch(stored(team), options)


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_a_base_that_vllm_cannot_serve_is_refused(for_cpu: None, tmp_path: Path, quantization: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"base: {{source: nano, quantization: {quantization}}}\nteam: {{agents: [{{name: a}}]}}\n")
    with pytest.raises(UserError, match=f"cannot serve LoRA on a base quantised to {quantization} on a CPU"):
        plan_launch(fresh(recipe), ServeOptions(accept_adapters=True))


def test_vllm_gets_a_template_of_ours_and_never_the_base_s(tiny_base: Path, tmp_path: Path, for_cpu: None) -> None:
    """One that behaves when it is tried and waits for a certain text would loop in vLLM, which renders without a limit."""
    shutil.copytree(tiny_base, tmp_path / "base")
    file = tmp_path / "base" / "chat_template.jinja"
    good = AutoTokenizer.from_pretrained(tiny_base).get_chat_template()
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    file.write_text("{% if 'now' in messages[-1].content %}" + endless + "{% endif %}" + good)
    (tmp_path / "r.yaml").write_text("base: {source: base}\nteam: {agents: [{name: a}]}\n")
    command = plan_launch(fresh(tmp_path / "r.yaml"), ServeOptions(accept_adapters=True)).command
    given = command[command.index("--chat-template") + 1]
    assert "range" not in given and "now" not in given
    turns = [{"role": "user", "content": "now"}]
    render = AutoTokenizer.from_pretrained(tiny_base).apply_chat_template
    assert render(turns, chat_template=given, tokenize=False) == render(turns, chat_template=good, tokenize=False)


@pytest.mark.parametrize(
    "template", ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 'x' * 9999999999 }}"]
)
def test_a_chat_template_that_does_not_end_never_reaches_vllm(
    template: str,
    tiny_base: Path,
    tmp_path: Path,
    for_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("teamtr_lora.team.template_limits.TRIAL_SECONDS", 1.0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(os, "execve", lambda *args: pytest.fail("it was started"))
    shutil.copytree(tiny_base, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").write_text(template)
    (tmp_path / "r.yaml").write_text("base: {source: base}\nteam: {agents: [{name: a}]}\n")
    assert main(["serve", str(tmp_path / "r.yaml"), "--accept-adapters"]) == 2
    error = capsys.readouterr().err
    assert "chat template" in error and "use another base" in error and error.count("\n") == 1


def test_an_altered_adapter_is_not_served(team: Path, for_cpu: None, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(team, copy)
    versions = read_run(copy).versions
    weights = copy / "adapters" / "solver" / versions["solver"].name / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match="does not match its hash"):
        plan_launch(stored(copy), ServeOptions())


def test_mistakes_are_one_line(
    team: Path, tmp_path: Path, for_cpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*argv: object) -> str:
        assert main(["serve", *map(str, argv)]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1, captured.err
        return captured.err

    monkeypatch.setattr(os, "execve", lambda *args: pytest.fail("it was started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'teamtr-lora[vllm]'" in refused(team)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "no run or team here" in refused(tmp_path)
    assert "add --accept-adapters" in refused(RECIPE)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port {port}: cannot listen there" in refused(team, "--port", port)
    for wrong in (["--port", "0"], ["--port", "x"], ["--memory-share", "1.5"]):
        with pytest.raises(SystemExit) as caught:
            main(["serve", str(team), *wrong])
        assert caught.value.code == 2


# --- a real one


@pytest.fixture
def real(team: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command becomes the server, as its user starts it; the fork has imported what the command does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "teamtr_lora", "serve", str(team), "--port", str(port), "--accept-adapters"]
    uploads = {"TEAMTR_LORA_UPLOADS": str(tmp_path / "uploads")}
    environment = {**os.environ, **uploads, "TEAM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = ForkedPython(
            [*command, "--api-key-variable", "TEAM_API_KEY"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    yield process, f"http://127.0.0.1:{port}"
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the engine is a child of its own
    process.wait()
    print((tmp_path / "log").read_text(errors="replace")[-3000:])  # pytest shows it if the test fails


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 300
    while True:
        assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            assert answer.status == 200
            return
        time.sleep(0.2)


def models(url: str) -> list[str]:
    return [model.id for model in openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0).models.list()]


def check_a_refusal(url: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run whose first adapter is of a larger rank than the server has room for: it is not live, and the run says so."""
    before = models(url)
    wide = 'team.agents=[{"name": "planner", "role": "ones", "lora": {"rank": 64}}]'
    server = ["rollout.engine=vllm_server", f'rollout.server.urls=["{url}"]', "rollout.server.api_key_variable=TEAM_API_KEY"]
    assert main(["train", str(RECIPE), *SMALL, wide, "task.digits=1", *server, "--run-dir", str(folder)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "planner v0000" in said[-1] and "is live nowhere: 1 of 1 servers did not take it" in said[-1]
    assert f"({url}: it answers " in said[-1] and "rank" in said[-1] and not folder.exists()
    assert models(url) == before


def prefix_cache_hits(url: str) -> float:
    """Tokens of prompts that were not computed again."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))


def commit_random(bank: AdapterBank, agent: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bank.restore(agent, {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in bank.snapshot(agent).items()})
    bank.commit(agent)


def run(sampler: Sampler, requests: list[Request]) -> list[Completion]:
    tickets, done = [sampler.submit(r) for r in requests], dict[int, Completion]()
    while len(done) < len(tickets):
        done |= {completion.ticket: completion for completion in sampler.poll()}
    return [done[ticket] for ticket in tickets]


def check_the_client(url: str, greedy: list[Completion], prompts: list[list[int]]) -> None:
    """Every agent by its name, with the adapter that was trained."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["nano", *AGENTS, "team"]
    chat = client.chat.completions.create(model="planner", messages=[{"role": "user", "content": "12+34"}], max_tokens=6)
    assert chat.model == "planner" and chat.choices[0].message.content is not None
    for agent, prompt, wanted in zip(AGENTS, prompts, greedy, strict=True):
        extra = {"return_token_ids": True, "ignore_eos": True}
        made: Any = client.completions.create(model=agent, prompt=prompt, temperature=0, max_tokens=8, extra_body=extra)
        assert made.model == agent and made.choices[0].token_ids == wanted.token_ids
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    for method, path in (("PUT", "/v1/teamtr/adapters/x"), ("POST", "/adapters"), ("POST", "/invocations")):
        upload = urllib.request.Request(url + path, data=b"{}", method=method, headers={"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:  # vLLM's own check comes after ours, or not at all
            urllib.request.urlopen(upload, timeout=10)
        assert caught.value.code == 401, path


def check_the_team(url: str, team: Path) -> None:
    """One request plays the protocol: greedy, it is what `ask` plays here."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    asked: Any = {"model": "team", "messages": [{"role": "user", "content": "347+285"}], "temperature": 0}
    wanted = ask_team(team, "347+285", temperature=0)
    made: Any = client.chat.completions.create(**asked)
    said = "\n\n".join(f"{m.agent}: {m.text}" for m in wanted.messages)
    assert made.model == "team" and made.choices[0].message.content == wanted.answer
    assert made.choices[0].message.reasoning_content == made.choices[0].message.reasoning == said
    read = sum(len(m.prompt_ids) for m in wanted.messages)
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (read, wanted.tokens)
    assert made.usage.total_tokens == read + wanted.tokens

    chunks: list[Any] = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert "".join(reasoning) == said and len(reasoning) > 2 * len(wanted.messages), "in pieces, as they are sampled"
    assert "".join(delta.content or "" for delta in deltas) == wanted.answer
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop" and chunks[-1].usage == made.usage
    for wrong in ({"n": 2}, {"messages": []}, {"temperature": -1}, {"messages": [{"role": "user", "content": "9" * 4000}]}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{**asked, **wrong})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).chat.completions.create(**asked)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.skipif(not serve._is_cpu_build(), reason="compares at fp32 accuracy, on vLLM's CPU build")
def test_a_real_server_to_its_end(
    team: Path,
    real: tuple[subprocess.Popen[bytes], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    process, url = real
    monkeypatch.setenv("TEAM_API_KEY", KEY)
    # while it starts: the same team here
    stored = read_run(team)
    recipe, versions = stored.recipe, stored.versions
    base = load_base("nano", device="cpu")
    bank = AdapterBank(base.model, {a.name: a.lora for a in recipe.team.agents}, base_name="nano", seed=0)
    here = TransformersSampler(base, bank, context_tokens=512)
    text = base.tokenizer("The quick brown fox adds 12 and 34 by columns. " * 8)["input_ids"]
    prompts = [text[: 140 + n] for n in range(3)]  # longer than a block (128) of the prefix cache
    greedy = [Request(p, a, SamplingParams(0.0, 8, ()), 0) for p, a in zip(prompts, AGENTS, strict=True)]
    for version in versions.values():
        bank.load(version, read_version(team / "adapters", version))
        here.publish(version)
    trained = run(here, greedy)
    wait_until_ready(process, url)
    check_the_client(url, trained, prompts)
    check_the_team(url, team)
    check_a_refusal(url, tmp_path / "run", capsys)

    section = {"urls": [url], "api_key_variable": "TEAM_API_KEY"}
    rollout = RolloutSection.model_validate({"engine": "vllm_server", "temperature": 1.5, "server": section})
    there = ServerSampler(base, bank, rollout, context_tokens=512)
    references: list[list[Completion]] = []
    for step in range(2):
        for agent in AGENTS:
            commit_random(bank, agent, 10 * step + len(agent))
            here.publish(bank.version(agent))
            there.publish(bank.version(agent))
        references.append(run(here, greedy))
        for wanted, got in zip(references[-1] * 2, run(there, greedy) + run(there, greedy), strict=True):
            assert got.error is None and got.token_ids == wanted.token_ids and got.version == wanted.version
            assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-3)
    assert prefix_cache_hits(url) >= 128 * len(AGENTS), "the prompts were in the cache"
    assert all(a.token_ids != b.token_ids for a, b in zip(*references, strict=True)), "and gave other messages all the same"
    check_sampling(bank, there, text[:40])

    there.submit(Request(text[:40], "planner", SamplingParams(1.5, 400, ()), 1))
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(UserError, match=r"no server is left .*checkpoint is intact.*--resume"):
        there.poll()
    there.close()


def check_sampling(bank: AdapterBank, sampler: ServerSampler, prompt: list[int]) -> None:
    """At a temperature: log-probabilities are the policy's own, and the seed alone decides the draw."""
    requests = [Request(prompt, agent, SamplingParams(1.5, 8, ()), derive_seed(n)) for n in range(5) for agent in AGENTS]
    done = run(sampler, requests)
    assert [c.token_ids for c in run(sampler, requests[::-1])][::-1] == [c.token_ids for c in done]
    assert len({tuple(c.token_ids) for c in done}) > 6
    for asked, made in zip(requests, done, strict=True):
        bank.activate(asked.agent)
        with torch.no_grad():
            logits = bank.model(input_ids=torch.tensor([asked.prompt_ids + made.token_ids])).logits[0]
        logp = torch.log_softmax(logits[len(prompt) - 1 :] / 1.5, dim=-1)
        assert made.logprobs == pytest.approx([float(logp[t, token]) for t, token in enumerate(made.token_ids)], abs=1e-3)
