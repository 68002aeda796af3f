"""The command line: parse, call, print; no logic. Exit codes: 0 ok, 2 user error in one line, 1 crash.

Modules:
    parser             argparse, with every mistake in one line
    arguments          values that several commands take
    examples           the examples under every --help
    launch             one command on several GPUs
    loading            a line before the imports that take seconds
    recipe_commands    train, validate, keys, plan, init
    team_commands      eval, ask, serve
    study_commands     certify, diagnose
    report_commands    report, view, runs
    task_commands      tasks, score
    registry_commands  adapters
    hub_commands       push, pull
    swap_commands      swap, rebase
    baseline_commands  baseline
    docs_command       docs
    text               (a folder) what the commands print
"""

from __future__ import annotations

import argparse
import errno
import importlib
import logging
import os
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from teamtr_lora import __version__
from teamtr_lora.cli.arguments import keep_stdout_for_json, trusting
from teamtr_lora.cli.examples import examples
from teamtr_lora.cli.launch import complained, may_complain, one_of_several, started_here
from teamtr_lora.cli.loading import telling_of_imports
from teamtr_lora.cli.parser import Parser
from teamtr_lora.common.consoles import say, wrapped
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.program import command_line
from teamtr_lora.common.visible import visible_streams

_PATH_ERRORS = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.EACCES, errno.EPERM}

_GROUPS = ("recipe_commands", "team_commands", "report_commands", "study_commands", "task_commands", "registry_commands",
           "hub_commands", "baseline_commands", "swap_commands", "docs_command")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    with visible_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")  # else torch leaves a file in /tmp for every process on some CPUs
    os.environ.setdefault("VLLM_LOGGING_COLOR", "0")  # its colours would be shown as the escapes that they are
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing kernels even where nothing is quantised
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    # argparse stops collecting overrides at the first option: those after it are in `rest`
    if any(word.startswith("-") for word in rest) or (rest and not hasattr(args, "overrides")):
        args.parser.refuse(rest)
    if args.command is None:
        parser.print_help()
        return 0
    args.argv = list(sys.argv[1:] if argv is None else argv)
    if rest:
        args.overrides = [*args.overrides, *rest]
    try:
        with trusting(args), command_line(), one_of_several(args), telling_of_imports(args.command, first=not started_here()):
            if getattr(args, "json", False):  # only now: of several processes, all but the first have no stdout any more
                keep_stdout_for_json()
            return int(args.run(args) or 0)
    except UserError as error:
        if args.debug:
            traceback.print_exc()
        # only a recipe's list of problems has several lines
        text = str(error) if hasattr(error, "problems") else " ".join(str(error).split())
        _complain(text)
        return 2
    except KeyboardInterrupt as stop:
        notes = getattr(stop, "__notes__", ["eval goes on by itself, train and baseline with --resume"])
        _complain(f"interrupted; what was saved is intact; {'; '.join(notes)}")
        return 130
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits when the program that reads our output has ended
            return 0
        raise
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads our output any more
        return 0
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if (wrong := _wrong_path(error)) and not args.debug:
            _complain(wrong)
            return 2
        if args.debug:
            traceback.print_exc()  # here, where the terminal is guarded, and not by the interpreter
        what = " ".join(f"{type(error).__name__}: {error}".split())
        hint = "" if args.debug else "; run again with --debug for the traceback"
        _complain(f"crashed: {what}{hint}")
        return 1


def _wrong_path(error: BaseException) -> str:
    """One line about a path that the system takes no files at, wherever it was given; empty for any other error."""
    if isinstance(error, OSError) and error.filename and error.errno in _PATH_ERRORS:
        return " ".join(f"{os.fsdecode(error.filename)}: no file can be here ({error.strerror}); give another path".split())
    return ""


def _complain(text: str) -> None:
    if may_complain():
        say(f"teamtr-lora: {text}", stderr=True)
        complained()


def build_parser() -> Parser:
    width = min(shutil.get_terminal_size().columns, 130)  # argparse does this for options only, if the examples are to stay
    common = Parser(add_help=False)
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of an error")
    parser = Parser(
        prog="teamtr-lora",
        description=wrapped("Trains teams of LLM agents, each a LoRA adapter on one frozen base, by TeamTR.", width),
        epilog=examples(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"teamtr-lora {__version__}")
    parser.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    parser.set_defaults(command=None, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(
        name: str, run: Any, text: str, notes: str = "", *, json: str = "", under: Any = commands
    ) -> argparse.ArgumentParser:
        """`json`: what --json prints, for commands that have it; `under`: the parsers of a command, for one of its actions."""
        added: argparse.ArgumentParser = under.add_parser(
            name.split()[-1],
            parents=[common],
            help=text,
            description=wrapped(text, width),
            epilog="\n\n".join(part for part in (wrapped(notes, width), examples(name)) if part),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run, parser=added)
        if json:
            added.add_argument("--json", action="store_true", help=json)
        return added

    for group in _GROUPS:
        importlib.import_module(f"teamtr_lora.cli.{group}").add_commands(command)
    return parser
