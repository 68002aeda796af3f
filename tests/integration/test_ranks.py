"""Several processes train one team: the same adapters and metric rows as one, whatever their number and whatever happens."""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from teamtr_lora.rollout.dealing import LOT_EPISODES
from teamtr_lora.runs.metrics import TIME_FIELDS
from teamtr_lora.training.cpu_processes import cores

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    'team.agents=[{"name": "planner", "role": "ones"}, {"name": "solver", "role": "tens"}]',
    "task.digits=2",
    "training.stages=2",
    "rollout.items_per_stage=5",
    "rollout.episodes_per_item=4",
    "training.inner_epochs=1",
    "training.learning_rate=0.008",
    "training.min_informative_groups=1",
    "training.tokens_per_microbatch=256",
    "trust_region.holdout=0.4",
    "trust_region.delta=0.01",
    "trust_region.gain=positive",
    "evaluation.items=4",
]

SKEWED = "skewed"  # in place of an argument: the rank's optimizer takes longer steps than the others'


def work(environment: dict[str, str], argv: list[str], errors: Path | None, lot: int) -> None:
    os.environ |= environment
    for stream, file in ((1, errors and errors.with_suffix(".out")), (2, errors)):
        if file is not None:
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    import torch

    from teamtr_lora.cli import main
    from teamtr_lora.rollout import dealing

    torch.set_num_threads(1)
    if argv[-1] == SKEWED:
        from teamtr_lora.training import optimize

        argv, step = argv[:-1], optimize._step
        optimize._step = lambda *given: step(*given[:-1], 1.01 * given[-1])
    if argv[0] == "baseline":  # TRL imports vLLM where it finds it, which takes longer than all of this
        importlib.import_module("trl.import_utils").is_vllm_available = lambda *_, **__: False  # type: ignore[attr-defined]
    dealing.LOT_EPISODES = lot
    raise SystemExit(main(argv))


@pytest.fixture(scope="module")
def server() -> ForkServerContext:
    """Its processes start with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["teamtr_lora.training.trainer", "teamtr_lora.evaluation.commands", "peft"])
    return context


def started(server: ForkServerContext, *argvs: list[str], errors: Path | None = None, lot: int = 8) -> list[ForkServerProcess]:
    """A process for each of `argvs`. A lot is two groups: with five, somebody gets a smaller one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    found = []
    for rank, argv in enumerate(argvs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(argvs))}
        environment = {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        found.append(server.Process(target=work, args=(environment, argv, errors, lot)))
        found[-1].start()
    return found


def ended(processes: list[ForkServerProcess], seconds: float = 200) -> list[int | None]:
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return codes


def train(run_dir: Path, *more: str) -> list[str]:
    return ["train", str(ROOT / "recipes" / "quickstart.yaml"), *SMALL, *more, "--run-dir", str(run_dir)]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIME_FIELDS} for row in found]


@pytest.fixture(scope="module")
def alone(server: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert ended(started(server, train(folder))) == [0]
    return folder


def test_the_number_of_processes_changes_nothing_but_times(server: ForkServerContext, alone: Path, tmp_path: Path) -> None:
    """Five groups on three ranks. Rows hold the content hash of every adapter, and all that was measured."""
    assert ended(started(server, *[train(tmp_path / "run")] * 3)) == [0] * 3
    assert rows(tmp_path / "run") == rows(alone)
    updates = [row for row in rows(alone) if row["kind"] == "update"]
    assert {"shrunk", "rejected"} <= {row["decision"] for row in updates}, "the example should have both"


def test_killed_ranks_end_the_others_and_any_number_of_them_goes_on(
    server: ForkServerContext, alone: Path, tmp_path: Path
) -> None:
    """Three ranks, of which the last is killed; then two, of which the first is; then one. In the end it is the same run."""
    run, resumed = tmp_path / "run", train(tmp_path / "run", "--resume")
    for ranks, victim, steps in ((3, 2, 2), (2, 0, 4)):
        processes = started(server, *[resumed] * ranks)
        wait_for_step(run, steps, processes)
        os.kill(processes[victim].pid or 0, signal.SIGKILL)
        codes = ended(processes, 120)
        assert codes.pop(victim) == -signal.SIGKILL and set(codes) == {2}, codes
    assert ended(started(server, resumed)) == [0]
    assert rows(run) == rows(alone)


def alive(process: ForkServerProcess | subprocess.Popen[str]) -> bool:
    return process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()


def wait_for_step(run: Path, steps: int, processes: Sequence[ForkServerProcess | subprocess.Popen[str]]) -> None:
    """Until the run has made so many checkpoints."""
    deadline = time.monotonic() + 200
    while not any(int(path.name.rpartition("-")[2]) >= steps for path in (run / "checkpoint").glob("step-*")):
        assert time.monotonic() < deadline and all(map(alive, processes))
        time.sleep(0.05)


@pytest.mark.skipif(cores() < 2, reason="one core: one process")
def test_a_plain_command_is_several_processes_and_the_same_run(server: ForkServerContext, tmp_path: Path) -> None:
    """One Ctrl-C ends them, in one line. Whoever goes on takes up their one thread: torch rounds passes of so many tokens
    differently with two, and the third adapter would be another one."""
    few = ["training.stages=1", "training.tokens_per_microbatch=1024"]
    assert ended(started(server, train(tmp_path / "one", *few), lot=LOT_EPISODES)) == [0]
    run, plain = tmp_path / "run", [sys.executable, "-m", "teamtr_lora", *train(tmp_path / "run", *few)]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(plain, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_step(run, 2, [process])
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    told = process.communicate(timeout=120)[1]
    loading, stopped = told.splitlines()  # of all the processes together
    assert process.returncode == 130 and loading == "loading libraries" and f"train {run} --resume" in stopped, told
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[1])["idle_share"] > 0, "it had nobody to wait for"
    assert subprocess.run([*plain, "--resume"], env=environment | {"OMP_NUM_THREADS": "2"}, timeout=200).returncode == 0
    assert rows(run) == rows(tmp_path / "one")


@pytest.mark.parametrize(
    ("differs", "said"), [("seed=1", "as its recipe"), (SKEWED, "after update 2 of stage 1")], ids=["recipe", "arithmetic"]
)
def test_ranks_that_differ_stop_the_run_with_one_line(server: ForkServerContext, tmp_path: Path, differs: str, said: str) -> None:
    """The first update is rejected, which puts the adapters back; the second is not."""
    errors, own = tmp_path / "errors", train(tmp_path / "run", "training.stages=1")
    assert ended(started(server, own, [*own, differs], errors=errors)) == [2, 2]
    told = " ".join(errors.read_text().split())
    assert told.count("teamtr-lora:") == 1 and "rank 1 has" in told and said in told, told


def test_an_evaluation_is_played_by_all_and_written_by_one(server: ForkServerContext, alone: Path, tmp_path: Path) -> None:
    found = []
    for ranks in (1, 3):
        out = tmp_path / "out"
        argv = ["eval", str(alone), "--limit", "12", "--k", "2", "--out", str(out), "--json"]
        assert ended(started(server, *[argv] * ranks, errors=tmp_path / f"{ranks}.err")) == [0] * ranks
        assert json.loads((tmp_path / f"{ranks}.out").read_text())["items"] == 12, "one JSON object"
        found.append({path.name: path.read_bytes() for path in out.iterdir() if not path.name.startswith(".")})
        shutil.rmtree(out)
    assert found[0] == found[1] and len(found[0]) == 3


@pytest.mark.parametrize("command", ["swap", "baseline"])
def test_what_the_first_process_carries_out_is_played_by_all(
    server: ForkServerContext, alone: Path, tmp_path: Path, command: str
) -> None:
    """Two lots a rollout: each process has one of them."""
    if command == "baseline" and importlib.util.find_spec("trl") is None:
        pytest.skip("trl is not installed (tools/setup --test installs it)")
    found = []
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        argv = ["baseline", "grpo", *train(run, "training.stages=1", "evaluation.items=12")[1:]]
        if command == "swap":
            shutil.copytree(alone, run)
            argv = ["swap", str(run), "--agent", "solver", "--with", "fresh:rank=2"]
            argv += ["--probe-contexts", "16", "--items", "12", "--delta-align", "0.001"]
        assert ended(started(server, *[argv] * ranks)) == [0] * ranks
        found.append(rows(run))
    assert found[0] == found[1]
    last = found[0][-1]
    assert last["kind"] == "swap" and last["steps"] > 0 if command == "swap" else last["updates"] == 2


def test_an_engine_can_make_a_group_of_its_own_in_a_process_of_torchrun(tmp_path: Path) -> None:
    """vLLM does. What torchrun leaves in the environment would make it wait for a store that nobody has."""
    (tmp_path / "engine.py").write_text(
        "import datetime, os, socket\n"
        "from torch import distributed\n"
        "from teamtr_lora.common.ranks import process_ranks\n"
        "ranks = process_ranks()\n"
        "with socket.socket() as free:\n"
        "    free.bind(('127.0.0.1', 0))\n"
        "    place = f'tcp://127.0.0.1:{free.getsockname()[1]}'\n"
        "distributed.init_process_group('gloo', place, datetime.timedelta(seconds=20), world_size=1, rank=0)\n"
        "os._exit(0 if ranks.gather(distributed.get_world_size()) == [1, 1] else 1)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    assert subprocess.run([*launcher, tmp_path / "engine.py"], env=environment, timeout=120).returncode == 0
