"""ASGI middleware by which a vLLM server takes adapters over HTTP, for trainers that share no disk with it.

`--middleware teamtr_lora.rollout.adapter_upload.AdapterUpload` (vLLM's own option) adds to the server

    GET    /v1/teamtr/adapters         says that uploads are taken here
    PUT    /v1/teamtr/adapters/NAME    stores an adapter and answers with its folder on the server; never overwrites (409)
    DELETE /v1/teamtr/adapters/NAME    removes it

Only so many are kept: to make room, the oldest that the server has not loaded go first (507 where all are in use).

The body is one safetensors file whose metadata holds the adapter's config as JSON. Files are only stored here: loading them is
vLLM's `/v1/load_lora_adapter`. Nothing that is uploaded is ever run or unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from teamtr_lora.base.adapter_files import MAX_HEADER_BYTES, MAX_WEIGHT_BYTES, read_header, read_matrices
from teamtr_lora.base.lora_config import read_lora_config
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import TEMPORARY, dump_json, sync_folder, write_synced
from teamtr_lora.common.foreign_files import parse_json
from teamtr_lora.rollout.asgi import App, Receive, RefusedError, Scope, Send, send_json

PATH = "/v1/teamtr/adapters"
CONFIG_KEY = "adapter_config"  # in the metadata of the safetensors file
UPLOADS = "TEAMTR_LORA_UPLOADS"  # environment variable: where to store; a temporary folder if it is not set

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")  # it becomes a folder, so it must not lead out of the one for uploads

# The only fields of PEFT's config that are allowed; plain LoRA needs these. Others could change the base or name code.
_FIELDS = ("peft_type", "r", "lora_alpha", "use_rslora", "bias", "target_modules")


def config_for_upload(config: Mapping[str, Any]) -> str:
    """The part of an adapter's config that an upload carries, as JSON."""
    return json.dumps({key: config[key] for key in _FIELDS}, sort_keys=True, allow_nan=False)


def _refused(status: int, message: str) -> RefusedError:
    return RefusedError(status, json.dumps({"error": message}).encode())


class RequireKey:
    """Asks for the server's API key, if it has one, wherever a request could change or use something.

    vLLM's own check covers its /v1 paths only: /invocations samples and /adapters loads LoRA for anyone.
    """

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                _authorise(scope)
                if "origin" in _headers(scope) and str(scope["path"]).rstrip("/").endswith(("lora_adapter", "/adapters")):
                    raise _refused(403, "a web page may not change which adapters are loaded")
            await self._handle(scope, receive, send)
        except RefusedError as refused:
            await send_json(send, refused.status, refused.body)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class AdapterUpload(RequireKey):
    """Takes uploads. vLLM puts such a middleware before its own check of the API key, so it has to check itself."""

    max_bytes = MAX_WEIGHT_BYTES
    max_stored = 64
    max_total_bytes = 4 * MAX_WEIGHT_BYTES
    max_at_once = 8

    def __init__(self, app: App) -> None:
        super().__init__(app)
        if given := os.environ.get(UPLOADS):
            self.root = Path(given).expanduser().absolute()
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        else:
            self._own = tempfile.TemporaryDirectory(prefix="teamtr-lora-uploads-")  # goes when the server ends
            self.root = Path(self._own.name)
        self._arriving = 0

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if path != PATH and not path.startswith(f"{PATH}/"):
            await self.app(scope, receive, send)
            return
        _authorise(scope)
        try:
            answer = await self._answer(scope, receive, path.removeprefix(PATH).removeprefix("/"))
        except OSError as error:
            raise _refused(507, f"the adapter cannot be stored: {error.strerror or type(error).__name__}") from error
        await send_json(send, 200, answer)

    async def _answer(self, scope: Scope, receive: Receive, name: str) -> dict[str, Any]:
        headers = _headers(scope)
        if "origin" in headers:  # sent by a web page in somebody's browser; vLLM's defaults would let any page in
            raise _refused(403, "uploads from web pages are refused")
        if not name and scope["method"] == "GET":
            return {"max_bytes": self.max_bytes}
        if not NAME.fullmatch(name):
            raise _refused(400, f"not an adapter name: it must match {NAME.pattern}")
        folder = self.root / name
        if scope["method"] == "DELETE":
            await asyncio.to_thread(_remove, folder)
            return {"removed": name}
        if scope["method"] != "PUT":
            raise _refused(405, "use PUT or DELETE")
        if folder.exists():
            raise _refused(409, f"{name} is here already, and an adapter is never overwritten")
        declared = headers.get("content-length", "0")
        if not (declared.isascii() and declared.isdigit()) or int(declared) > self.max_bytes:
            raise _refused(413, f"more than {self.max_bytes} bytes")
        if self._arriving >= self.max_at_once:
            raise _refused(503, f"{self._arriving} uploads are arriving already; try again")
        self._arriving += 1
        try:
            await asyncio.to_thread(self._make_room, int(declared) or self.max_bytes, _loaded(scope))
            await self._store(folder, receive)
        finally:
            self._arriving -= 1
        return {"path": str(folder)}

    def _make_room(self, size: int, loaded: set[str] | None) -> None:
        """Removes the oldest adapters that are not in use until one of `size` bytes fits. Where the server does not show what it
        has loaded (`loaded` is None), any of them may be in use."""
        stored = sorted(
            (path for path in self.root.iterdir() if NAME.fullmatch(path.name)), key=lambda path: path.stat().st_mtime
        )
        sizes = {path: sum(file.stat().st_size for file in path.iterdir()) for path in stored}
        while len(sizes) >= self.max_stored or sum(sizes.values()) + size > self.max_total_bytes:
            unused = [] if loaded is None else [path for path in stored if path in sizes and str(path) not in loaded]
            if not unused:
                raise _refused(507, f"{len(sizes)} adapters are stored here and in use, which is all that there is room for")
            _remove(unused[0])
            del sizes[unused[0]]

    async def _store(self, folder: Path, receive: Receive) -> None:
        """Writes the upload beside its folder, checks it, then renames it: the folder is there whole or not at all."""
        unfinished = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=self.root))
        try:
            weights = unfinished / "adapter_model.safetensors"
            with weights.open("wb") as file:
                await self._receive_body(receive, file.write)
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
            config = await asyncio.to_thread(_check, weights)
            await asyncio.to_thread(_publish, unfinished, folder, config)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)

    async def _receive_body(self, receive: Receive, write: Callable[[bytes], object]) -> None:
        received = 0
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise _refused(400, "the upload was cut short")
            received += len(event.get("body", b""))
            if received > self.max_bytes:
                raise _refused(413, f"more than {self.max_bytes} bytes")
            write(event.get("body", b""))
            if not event.get("more_body", False):
                return


def _keys(scope: Scope) -> list[str]:
    """The server's API keys, by vLLM's own rule: --api-key, else VLLM_API_KEY."""
    try:
        given = scope["app"].state.args.api_key
    except (KeyError, AttributeError):  # a vLLM that keeps its key elsewhere may have one, so everybody is refused
        raise _refused(503, "whether this server has an API key cannot be told (vLLM 0.26 to 0.32 show it)") from None
    return [key for key in (given or [os.environ.get("VLLM_API_KEY")]) if key]


def _loaded(scope: Scope) -> set[str] | None:
    """The folders of the adapters that vLLM has loaded; None where it does not say."""
    try:
        return {str(request.lora_path) for request in scope["app"].state.openai_serving_models.lora_requests.values()}
    except (KeyError, AttributeError):
        return None


def _authorise(scope: Scope) -> None:
    scheme, _, given = _headers(scope).get("authorization", "").partition(" ")
    digest, keys = hashlib.sha256(given.encode()).digest(), _keys(scope)
    # every key is compared, and in constant time, so that the time it takes tells nothing about any of them
    matches = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    if keys and not (scheme.lower() == "bearer" and any(matches)):
        raise _refused(401, "Unauthorized")


def _headers(scope: Scope) -> dict[str, str]:
    return {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}


def _check(weights: Path) -> dict[str, Any]:
    """The config of an uploaded adapter, if it and the tensors are those of a plain LoRA."""
    try:
        with weights.open("rb") as file:
            start = file.read(8 + MAX_HEADER_BYTES)
        tensors, metadata = read_header(start, "the upload", size=weights.stat().st_size)
        config = _check_config(metadata.get(CONFIG_KEY, ""))
        read_matrices(tensors, config["r"], "the upload")
    except UserError as error:
        raise _refused(400, str(error)) from error
    return config


def _check_config(text: str) -> dict[str, Any]:
    config = parse_json(text, f"the metadata key {CONFIG_KEY}")
    if odd := sorted(config.keys() ^ set(_FIELDS)):
        raise _refused(400, f"{CONFIG_KEY}: {odd[0][:64]!r} is missing or not a field of plain LoRA")
    read_lora_config(config, CONFIG_KEY)
    modules = config["target_modules"]
    if not modules or not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        raise _refused(400, f"{CONFIG_KEY}: target_modules must be a list of names")
    return config


def _publish(unfinished: Path, folder: Path, config: dict[str, Any]) -> None:
    write_synced(unfinished / "adapter_config.json", dump_json(config).encode())
    sync_folder(unfinished)
    try:
        unfinished.rename(folder)
    except OSError as error:
        if folder.exists():  # another upload of the same name was faster
            raise _refused(409, f"{folder.name} is here already, and an adapter is never overwritten") from error
        raise


def _remove(folder: Path) -> None:
    doomed = folder.with_name(f"{TEMPORARY}removed-{folder.name}")
    try:
        folder.rename(doomed)  # no longer found from here on, even if deleting fails
    except FileNotFoundError as error:
        raise _refused(404, f"no adapter {folder.name} here") from error
    with contextlib.suppress(OSError):
        shutil.rmtree(doomed)
