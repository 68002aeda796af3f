"""Commands on several GPUs: what is refused, and that a launched failure is one line with its own exit code."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from teamtr_lora.cli import main
from teamtr_lora.cli.launch import on_every_gpu
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.ranks import process_ranks

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = str(ROOT / "recipes" / "quickstart.yaml")


@pytest.mark.parametrize(
    ("visible", "gpus", "device", "said"),
    [
        (0, 2, "auto", "--gpus 2: 0 GPUs are visible; on a CPU, or to share a GPU, use torchrun --nproc-per-node 2"),
        (2, 3, "cuda", "--gpus 3: 2 GPUs are visible"),
        (4, 2, "cuda:1", "--gpus 2: base.device = cuda:1 names one device; use base.device=auto"),
        (4, 2, "cpu", "--gpus 2: base.device = cpu names one device"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: int, gpus: int, device: str, said: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(UserError) as error:
        on_every_gpu(argparse.Namespace(gpus=gpus, command="train", argv=[]), device)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("visible", "gpus", "device", "processes"),
    [(8, None, "auto", 8), (8, 3, "cuda", 3), (8, 1, "auto", 0), (8, None, "cuda:1", 0), (0, None, "cuda", 0)]
    + [(0, None, "auto", 4), (8, None, "cpu", 4), (0, 1, "auto", 0), (0, 1, "cpu", 0)],
)
@pytest.mark.parametrize("set_by_user", [False, True])
def test_a_process_is_started_for_every_gpu_or_core(
    monkeypatch: pytest.MonkeyPatch, visible: int, gpus: int | None, device: str, processes: int, set_by_user: bool
) -> None:
    """On a CPU, whoever sets the number of threads wants one process."""
    monkeypatch.setattr(process_ranks(), "threads", None)
    monkeypatch.setattr("teamtr_lora.cli.launch._given_threads", 2 if set_by_user else 0)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "2")
    processes = 0 if set_by_user and processes == 4 else processes
    started: list[tuple[list[str], int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr("teamtr_lora.cli.launch._launch", lambda argv, count: started.append((argv, count)) or 0)
    ended = on_every_gpu(argparse.Namespace(gpus=gpus, command="train", argv=["train", "x"]), device, on_cpu=lambda: 4)
    assert started == ([(["train", "x"], processes)] if processes else [])
    assert ended == (0 if processes else None) and process_ranks().threads == (2 if set_by_user else 0)
    assert os.environ["OMP_NUM_THREADS"] == ("1" if processes == 4 else "2")


@pytest.mark.skipif(os.cpu_count() == 1, reason="one core has one thread")
def test_a_resumed_run_can_have_more_threads_than_its_process_was_given() -> None:
    """As torch has two, the product is that of a process which was given two: OpenBLAS would otherwise stay with one."""
    code = (
        "import hashlib, sys; from teamtr_lora.cli.launch import _take_threads\n"
        "_take_threads(resuming=sys.argv[1] == 'resuming')\n"
        "import torch; torch.set_num_threads(2); torch.manual_seed(0)\n"
        "print(hashlib.sha256((torch.randn(4096, 1000) @ torch.randn(1000, 128)).numpy().tobytes()).hexdigest())"
    )
    found = []
    for given, how in (("2", "new"), ("1", "resuming")):
        environment = os.environ | {"OMP_NUM_THREADS": given}
        found.append(subprocess.run([sys.executable, "-c", code, how], env=environment, capture_output=True, text=True).stdout)
    assert len(found[0]) == 65 and found[0] == found[1]


def test_a_command_for_one_process_refuses_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["validate", QUICKSTART]) == 2
    assert "validate: works in one process" in capsys.readouterr().err


def test_a_process_that_is_silent_tells_whom_it_waits_for() -> None:
    """The first one, which prints, waits for it and knows no more."""
    code = (
        "import sys, time; from types import SimpleNamespace; from teamtr_lora.cli import launch\n"
        "from teamtr_lora.rollout import patience; patience._due = 0.01\n"
        "launch.started_by_launcher, launch.process_ranks = lambda: True, lambda: SimpleNamespace(first=False, helped=False)\n"
        "with launch.one_of_several(SimpleNamespace(gpus=None)), patience.waiting_for('a word', 'item-7'):\n"
        "    print('nothing', file=sys.stderr); time.sleep(1.2)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = said.stderr.splitlines()
    assert lines and all(line.startswith("item 'item-7': str has not answered") for line in lines) and not said.stdout


def test_a_mistake_is_told_once_by_all_processes() -> None:
    code = "import sys; from teamtr_lora.cli.launch import _launch; sys.exit(_launch(sys.argv[1:], 2))"
    wrong = [sys.executable, "-c", code, "train", QUICKSTART, "training.stage=1", "base.device=cpu"]
    found = subprocess.run(wrong, capture_output=True, text=True, timeout=200)
    lines = [line for line in found.stderr.splitlines() if line.strip()]
    assert found.returncode == 2 and len(lines) == 1 and "did you mean" in lines[0], found.stderr


def test_a_line_before_slow_imports_comes_from_the_first_process_alone(tmp_path: Path) -> None:
    """Not before a mistake that shows without them, and not in the processes that a command has started."""
    (tmp_path / "torch.py").write_text("raise SystemExit('it is looked for here')\n")
    script = """
import sys
from teamtr_lora.cli import launch, main
launch._started_here = sys.argv.pop(1) == "started"
sys.exit(main(sys.argv[1:]))
"""

    def told(how: str, *argv: str) -> list[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
        command = [sys.executable, "-c", script, how, *argv]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=tmp_path)
        return found.stderr.splitlines()

    for command in (["train", QUICKSTART], ["eval", QUICKSTART], ["swap", "run", "--undo"], ["baseline", "grpo", QUICKSTART]):
        assert told("alone", *command) == ["loading libraries", "it is looked for here"], command
    assert told("started", "train", QUICKSTART) == ["it is looked for here"]
    assert told("alone", "plan", QUICKSTART) == ["it is looked for here"]
    assert len(told("alone", "train", QUICKSTART, "training.stage=1")) == 1


def test_the_processes_that_a_command_starts_have_its_stdout() -> None:
    """With --json stdout is for the JSON alone, and one of the processes prints it."""
    script = """
import os, sys
import torch.distributed.launcher.api as api
from teamtr_lora.cli import arguments, launch
api.elastic_launch = lambda config, program: lambda *argv: os.write(1, b"{}")
arguments.keep_stdout_for_json()
print("a library")
sys.exit(launch._launch(["train"], 2))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{}", "a library\n")
