"""Python programs without their seconds of imports: a fork of this process, which has them behind it, runs the program's file."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch


class ForkedPython(subprocess.Popen):
    """In place of subprocess.Popen, for `python FILE ...` and `python -m MODULE ...`. Other commands are started as ever."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        words = [str(word) for word in args[1:]]
        if args[0] != sys.executable or not (words[0] == "-m" or words[0].endswith(".py")):
            super()._execute_child(args, *options)
            return
        environment, pipes = options[5], options[9:15]  # pipes: each stream's end to read from and its end to write to
        self.pid = os.fork()
        if self.pid == 0:
            if options[20]:
                os.setsid()
            _become(words, (pipes[0], pipes[3], pipes[5]), environment)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def _become(words: list[str], streams: Sequence[int], environment: Mapping[str, str] | None) -> NoReturn:
    code: Any = 1
    try:
        for number, end in enumerate(streams):
            if end != -1:
                os.dup2(end, number)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # what others are told and asked through
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
