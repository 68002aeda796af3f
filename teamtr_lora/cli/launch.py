"""One command on several GPUs, or cores: a process each, started and watched by torch's own launcher."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from teamtr_lora.cli.arguments import give_stdout_back, positive
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.ranks import GPUS_EACH, process_ranks, started_by_launcher

_WATCHED = "TEAMTR_LORA_LAUNCHER"  # the process that has started this one
_stderr: int | None = None  # the terminal, while this rank is silent
_given_threads: int | None = 0  # by OMP_NUM_THREADS, before it is changed; None where it says something odd
_started_here = False  # by `_launch`, whose --gpus this process has been given too


def add_gpus(parser: argparse.ArgumentParser) -> None:
    text = "use the first N of the visible GPUs (default: all); 1 is one process on a CPU too"
    parser.add_argument("--gpus", type=positive, metavar="N", help=text)


def processes_on(gpus: int, each: int) -> int:
    if gpus % each:
        raise UserError(f"--gpus {gpus}: no multiple of rollout.vllm.tensor_parallel = {each}, which a process needs")
    return gpus // each


def on_every_gpu(
    args: argparse.Namespace, device: str, each: int = 1, *, helping: bool = False, on_cpu: Callable[[], int] = lambda: 1
) -> int | None:
    """Runs this command once for `each` GPUs and returns its exit code. None: this process is to do the work, alone or as one of
    those that were started. `device`: the recipe's base.device. `helping`: the first process does the work, and the others help
    it to play episodes, here, until it is done. `on_cpu`: how many processes are worth starting where there is no GPU."""
    process_ranks().threads = _given_threads
    if started_by_launcher() or process_ranks().size > 1:
        if args.gpus is not None and not _started_here:
            raise UserError(f"--gpus {args.gpus}: the launcher that started this process has set their number; leave --gpus out")
        return _help() if helping else None
    if device == "cpu" or ":" in device:
        if args.gpus is not None and args.gpus > 1:
            raise UserError(f"--gpus {args.gpus}: base.device = {device} names one device; use base.device=auto")
        visible = 0
    else:
        import torch

        visible = torch.cuda.device_count()
    if args.gpus is not None and args.gpus > max(1, visible):
        several = f"torchrun --nproc-per-node {args.gpus} -m teamtr_lora {args.command} ..."
        raise UserError(f"--gpus {args.gpus}: {visible} GPUs are visible; on a CPU, or to share a GPU, use {several}")
    if not visible:
        one = _given_threads != 0 or args.gpus is not None or device not in ("auto", "cpu") or "WORLD_SIZE" in os.environ
        return None if one or (count := on_cpu()) == 1 else _launch_on_cpu(args.argv, count)
    count = processes_on(args.gpus or visible // each * each, each)
    if each > 1:
        os.environ[GPUS_EACH] = str(each)
    return _launch(args.argv, count) if count > 1 else None


def _help() -> int | None:
    ranks = process_ranks()
    ranks.helping = True
    if ranks.first:
        return None
    from teamtr_lora.rollout.helping import help_to_play

    help_to_play()
    return 0


def _launch_on_cpu(argv: list[str], count: int) -> int:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not every machine can resolve the name that it gives itself
    return _launch(argv, count)


def _launch(argv: list[str], count: int) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable(logging.ERROR)  # torch reports a failure in thirty lines, which a rank has told in one
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # items that a user's code takes out of a set have one order in all processes
    os.environ[_WATCHED] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    # the same program as this one, by whose name the processes tell what to type next
    start = [sys.argv[0]] if os.path.basename(sys.argv[0]) == "teamtr-lora" else ["-m", "teamtr_lora"]
    give_stdout_back()
    try:
        elastic_launch(config, sys.executable)(*start, *argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not tell itself
            name = signal.Signals(-failure.exitcode).name
            print(f"teamtr-lora: rank {rank} was ended by {name}; what was saved is intact", file=sys.stderr)
            return 1
        return int(failure.exitcode)
    except SignalException as stop:
        return 128 + int(stop.sigval)
    return 0


def started_here() -> bool:
    """Whether another process of this command has started this one."""
    return _started_here


@contextmanager
def one_of_several(args: argparse.Namespace) -> Iterator[None]:
    """Around a command: the first rank prints, the others are silent unless they fail, or wait for an environment."""
    _take_threads(resuming=getattr(args, "resume", False))
    if not started_by_launcher():
        yield
        return
    if not hasattr(args, "gpus"):
        raise UserError(f"{args.command}: works in one process; start it without torchrun or accelerate's launcher")
    global _started_here, _stderr
    if _WATCHED in os.environ:
        _started_here = True
        threading.Thread(target=_watch, args=(int(os.environ.pop(_WATCHED)),), daemon=True).start()
    if not process_ranks().first:
        _stderr = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        terminal = os.fdopen(_stderr, "w", closefd=False)
        logging.getLogger("teamtr_lora.rollout.patience").addHandler(logging.StreamHandler(terminal))
    yield
    if process_ranks().helped:
        process_ranks().broadcast(None)


def _take_threads(*, resuming: bool) -> None:
    """A resumed run goes on with the threads that it was started with, which may be more than this process was given. torch can
    take any number at any time, but OpenBLAS no more than the variable said when torch was loaded."""
    global _given_threads
    given = os.environ.get("OMP_NUM_THREADS")
    _given_threads = int(given or 0) if given is None or given.isdigit() else None
    if resuming and _given_threads and "torch" not in sys.modules:
        os.environ["OMP_NUM_THREADS"] = str(max(_given_threads, os.cpu_count() or 1))


def may_complain() -> bool:
    """Whether this process tells the user of a failure: of several that fail together, the first."""
    if process_ranks.cache_info().currsize == 0:
        return True
    if _stderr is not None:
        sys.stderr.flush()
        os.dup2(_stderr, 2)
    return process_ranks().announce_failure()


def complained() -> None:
    """To be called when the failure was told."""
    if process_ranks.cache_info().currsize:
        process_ranks().outlast()


def _watch(launcher: int) -> None:
    """A launcher that was killed cannot end its processes."""
    while os.getppid() == launcher:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
