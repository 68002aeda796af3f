"""One repository of the model hub through huggingface_hub: listed, read, filled by one commit.

The client takes the token from its own login or the environment; this file never asks for it except to keep it out of messages.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, errors, get_token, hf_hub_url
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from huggingface_hub.utils import logging as client_logging

from teamtr_lora.base.source import HUB_ID
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import NO_SPACE

REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
AGAIN = "nothing was committed or stored: run the command again"
# What an answer of the hub means to the user, by its status.
ANSWERS = {
    401: f"the hub does not know you (401); {LOG_IN}",
    403: "your account may not do this there (403: {words}); use a token that may write, or another repository",
    404: f"not on the hub, or private (404); check the name and the revision, or {LOG_IN}",
    409: "somebody changed it at the same time (409); nothing of yours was committed: run the command again",
    412: "somebody changed it at the same time (412); nothing of yours was committed: run the command again",
    429: "too many requests for the hub (429); wait some minutes, then run the command again",
}
WAITS = (1.0, 2.0, 4.0)  # seconds before each further try of a step that the client itself tries once
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
# What the client's HTTP library raises; which library that is differs from version to version.
NETWORK = (errors.HfHubHTTPError.__bases__[0], ConnectionError, TimeoutError)
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    size: int
    oid: str  # SHA-256 of a large file, git's SHA-1 of a small one


@dataclass(frozen=True)
class Remote:
    """A repository at one commit."""

    commit: str
    private: bool
    files: dict[str, RemoteFile]


class HubRepo:
    """`name` on the hub, at branch, tag or commit `revision`."""

    def __init__(self, name: str, revision: str | None = None) -> None:
        self.name, self.revision = repo_name(name), revision or "main"
        if not REVISION.fullmatch(self.revision) or ".." in self.revision:
            raise UserError(f"--revision: '{self.revision}' is not the name of a branch, tag or commit")
        self.api = HfApi(library_name="teamtr-lora")

    @property
    def where(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"

    @property
    def url(self) -> str:
        address = f"{self.api.endpoint}/{self.name}" + ("" if self.revision == "main" else f"/tree/{self.revision}")
        return _without_token(address)

    def look(self) -> Remote | None:
        """What is there now; None where there is no such repository or no such branch."""
        try:
            info = _again(lambda: self.api.model_info(self.name, revision=self.revision, files_metadata=True, timeout=30))
        except Exception as error:
            if _status(error) == 404:  # a stranger gets 401 instead, whether the repository exists or not
                return None
            raise self._explained(error) from _shown(error)
        if not isinstance(info.sha, str) or not constants.REGEX_COMMIT_OID.fullmatch(info.sha):
            raise UserError(f"{self.where}: the hub names no commit; is HF_ENDPOINT a model hub?")
        files = {file.rfilename: self._listed(file, info.sha) for file in info.siblings or []}
        return Remote(info.sha, bool(info.private), files)

    def fetch(self, path: str, remote: Remote, folder: Path) -> Path:
        """Downloads one listed file to `folder`; nothing is written anywhere else."""
        with self._errors():
            got = self.api.hf_hub_download(self.name, path, revision=remote.commit, local_dir=folder)
        file, size = Path(got), remote.files[path].size
        if file.is_symlink() or file.stat().st_size != size:
            raise UserError(f"{self.where}: {path} arrived with {file.stat().st_size} bytes of {size}; run the command again")
        return file

    def create(self, private: bool) -> None:
        with self._errors():
            _again(lambda: self.api.create_repo(self.name, private=private or None, exist_ok=True))

    def make_branch(self) -> None:
        with self._errors():
            _again(lambda: self.api.create_branch(self.name, branch=self.revision, exist_ok=True))

    def commit(self, head: Remote, files: Mapping[str, bytes | Path], remove: list[str], title: str) -> str:
        """One commit on `head`, or none: large files go to storage first, which shows nothing. Returns the commit's id.

        `head` is named as the parent, so a commit that arrived although its answer was lost is never made twice.
        """
        additions = [CommitOperationAdd(path, data) for path, data in files.items()]
        operations: list[Any] = [*additions, *(CommitOperationDelete(path, is_folder=False) for path in remove)]
        with self._errors():  # the client itself tries these uploads several times
            self._upload(additions)
        for wait in (*WAITS, None):
            try:
                with quiet():
                    done = self.api.create_commit(
                        self.name, operations, commit_message=title, revision=self.revision, parent_commit=head.commit
                    )
                return str(done.oid)
            except Exception as error:
                if not (_transient(error) or _status(error) == 412):
                    raise self._explained(error) from _shown(error)
                now = self._look_after_commit()
                if now and now.commit != head.commit and _holds(now, files, remove):
                    return now.commit
                if wait is None or not _transient(error):
                    raise self._explained(error) from _shown(error)
                time.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _listed(self, file: Any, commit: str) -> RemoteFile:
        size = file.size
        if size is None:  # some hubs list names only
            with self._errors():
                url = hf_hub_url(self.name, file.rfilename, revision=commit, endpoint=self.api.endpoint)
                size = _again(lambda: self.api.get_hf_file_metadata(url=url)).size
        return RemoteFile(-1 if size is None else int(size), str(file.lfs.sha256 if file.lfs else file.blob_id))

    def _upload(self, additions: list[CommitOperationAdd]) -> None:
        """Large files to the hub's storage."""
        try:
            self.api.preupload_lfs_files(self.name, additions, revision=self.revision, free_memory=False)
        except ConnectionError as error:
            if constants.HF_HUB_DISABLE_XET or not re.search(r"\b404\b.*xet-write-token", str(error)):
                raise
            text = "the hub has no Xet storage; set HF_HUB_DISABLE_XET=1 and run the command again"
            raise UserError(f"{self.where}: {text}") from _shown(error)
        if ignored := [op.path_in_repo for op in additions if getattr(op, "_should_ignore", False)]:
            raise UserError(
                f"{self.where}: its .gitignore keeps {ignored[0]} out; remove that line there, or choose another --repo"
            )

    def _look_after_commit(self) -> Remote | None:
        try:
            return self.look()
        except UserError as error:
            text = "the hub stopped answering while it took the commit, which is there whole or not at all: run the command again"
            raise UserError(f"{self.where}: {text}") from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            with quiet():
                yield
        except UserError:
            raise
        except Exception as error:
            raise self._explained(error) from _shown(error)

    def _explained(self, error: BaseException) -> UserError:
        """A failure of the hub or the network as one line that says whether to wait or what to fix."""
        status, chain = _status(error), list(_chain(error))
        full = [e for e in chain if isinstance(e, OSError) and e.errno in NO_SPACE]
        if any(isinstance(e, errors.OfflineModeIsEnabled) for e in chain):
            text = "the hub is not asked in offline mode; unset HF_HUB_OFFLINE"
        elif any(isinstance(e, errors.GatedRepoError) for e in chain):
            text = f"is gated: accept its terms on the hub, then {LOG_IN}"
        elif status in ANSWERS:
            text = ANSWERS[status].format(words=_words(error))
        elif status is not None and status >= 500:
            text = f"the hub failed ({status}: {_words(error)}) in every try; {AGAIN}"
        elif status is not None:
            text = f"the hub refused ({status}: {_words(error)})"
        elif full:
            text = f"no space left ({full[0].strerror}); free some space and run the command again"
        elif any(isinstance(e, errors.HFValidationError) for e in chain):
            text = f"the hub takes no such name ({_words(error)})"
        elif any(isinstance(e, (*NETWORK, OSError)) for e in chain):
            text = f"the hub could not be reached or broke off ({_words(error)}); {AGAIN}"
        else:
            text = f"the hub's answer cannot be read ({_words(error)}); is HF_ENDPOINT a model hub?"
        return UserError(f"{self.where}: {text}")


def repo_name(name: str) -> str:
    """A hub id as user/name; the hub has more rules, and says so itself."""
    if Path(name).is_dir() and not HUB_ID.fullmatch(name):
        raise UserError(
            f"'{name[:200]}' is a folder, and a repository of the hub is user/name; commands take a team of a folder by its path"
        )
    if not HUB_ID.fullmatch(name) or ".." in name or "--" in name or name.endswith(".git"):
        raise UserError(f"'{name[:200]}' is not a repository of the hub; give it as user/name")
    return name


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's own bars, or none."""
    was_off = are_progress_bars_disabled()
    if shown or was_off:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the client's warnings about each try: we print one line in the end."""
    verbosity = client_logging.get_verbosity()
    client_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        client_logging.set_verbosity(verbosity)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _holds(remote: Remote, files: Mapping[str, bytes | Path], remove: list[str]) -> bool:
    """Whether the commit is there although its answer was lost."""
    for path, data in files.items():
        content = data if isinstance(data, bytes) else data.read_bytes()
        there = remote.files.get(path)
        if there is None or there.oid not in (git_oid(content), hashlib.sha256(content).hexdigest()):
            return False
    return not any(path in remote.files for path in remove)


def _again(call: Callable[[], Result]) -> Result:
    """Calls a step that the client itself tries only once, several times where the failure may be temporary."""
    for wait in WAITS:
        try:
            with quiet():
                return call()
        except Exception as error:
            if not _transient(error):
                raise
        time.sleep(wait)
    with quiet():
        return call()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _status(error: BaseException) -> int | None:
    """The hub's answer, wherever in the chain of errors it is."""
    for found in _chain(error):
        code = getattr(getattr(found, "response", None), "status_code", None)
        if isinstance(code, int):
            return code
    return None


def _transient(error: BaseException) -> bool:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return False
    status = _status(error)
    return status in TRANSIENT if status is not None else isinstance(error, NETWORK)


def _words(error: BaseException, limit: int = 160) -> str:
    """The text of an error in one short line, without the token."""
    told = getattr(error, "server_message", None) or str(error)
    if isinstance(error, RuntimeError | errors.LocalEntryNotFoundError):  # these only name the file; the reason is in their cause
        told = (
            f"{str(error)[:80]}: {list(_chain(error))[-1]}" if isinstance(error, RuntimeError) else str(list(_chain(error))[-1])
        )
    clean = "".join(c if c.isprintable() else " " for c in _without_token(str(told))).split()
    text = " ".join(clean) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _without_token(text: str) -> str:
    """The text with the token replaced, also where a library shows the token as an escaped literal."""
    token: str | None = None
    with contextlib.suppress(Exception):  # an error while looking for it is not the error to report
        token = get_token()
    for shown in {token, repr(token)[1:-1], ascii(token)[1:-1]} if token else ():
        text = text.replace(str(shown), "<token>")
    text = re.sub(r"(?<=://)[^/\s@'\"]+@", "<token>@", text)  # a name and a password in the endpoint's address
    return re.sub(r"(?i)\bbearer\s+[^\s'\"]+|\bhf_[A-Za-z0-9_]{6,}", "<token>", text)


def _shown(error: BaseException) -> BaseException | None:
    """The cause for --debug, unless a hub that echoes what it was sent put the token into it."""
    return None if any(_without_token(str(found)) != str(found) for found in _chain(error)) else error
