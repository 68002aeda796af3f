"""Whether a new adapter can take an agent's place: every check with what is old, what is new, a verdict and a fix."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from tokenizers import Tokenizer
from torch import Tensor

from teamtr_lora.base.frozen_base import BaseFacts
from teamtr_lora.base.lora_config import misfit
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.foreign_files import show
from teamtr_lora.recipe import LoraSection, Recipe, problems
from teamtr_lora.registry.identity import Identity, merges, protocol_hash
from teamtr_lora.registry.imports import understand
from teamtr_lora.swap.newcomer import Incoming, fresh_lora

STRINGS = 1000  # context strings whose token ids are compared, where the probe has that many

Verdict = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Check:
    check: str
    old: str
    new: str
    verdict: Verdict  # note: nothing to stop for, but worth knowing
    fix: str = ""


def stop_on_failure(checks: Sequence[Check]) -> None:
    failed = next((check for check in checks if check.verdict == "fail"), None)
    if failed:
        raise UserError(f"the new adapter does not fit: {failed.check}: {failed.old} against {failed.new}; {failed.fix}")


@dataclass(frozen=True)
class Fitting:
    """A new adapter as the base takes it, with every check. `lora` is None where a check failed."""

    checks: list[Check]
    lora: LoraSection | None
    tensors: dict[str, Tensor] | None  # None: fresh


def fit_adapter(
    recipe: Recipe, old: LoraSection, agent: str, incoming: Incoming, facts: BaseFacts, identity: Identity
) -> Fitting:
    """What can be known without the base's weights or an episode."""
    checks = [_base(recipe, incoming, identity), _head(facts, incoming)]
    lora, tensors = None, None
    try:
        if incoming.contents is None:
            lora = fresh_lora(incoming.fresh, old)
            checks.append(Check("shapes", f"{len(facts.linears)} linear layers", "made to fit", "ok"))
        else:
            adapter = understand(incoming.contents, incoming.spec, facts)
            lora, tensors = adapter.lora, adapter.tensors
            fits = f"fits {len(tensors) // (3 if lora.dora else 2)} of them"
            checks.append(Check("shapes", f"{len(facts.linears)} linear layers", fits, "ok"))
        checks += [*lora_checks(old, lora, facts), _engine(recipe, agent, lora)]
    except UserError as error:
        checks.append(
            Check("shapes", f"{len(facts.linears)} linear layers", incoming.spec, "fail", fix=" ".join(str(error).split()))
        )
    checks += protocol_checks(recipe, incoming)
    return Fitting(checks, None if any(c.verdict == "fail" for c in checks) else lora, tensors)


def _base(recipe: Recipe, incoming: Incoming, identity: Identity) -> Check:
    ours = f"{recipe.base.source} ({identity.base.weights_hash[:12]})"
    if not incoming.foreign and incoming.manifest is None:
        return Check("base", ours, "the same", "ok")
    if incoming.manifest is not None:
        theirs = incoming.manifest.base
        same = theirs.weights_hash == identity.base.weights_hash
        fix = "" if same else "move it with `teamtr-lora rebase`, or take one that was trained on this base"
        return Check("base", ours, f"{theirs.source} ({theirs.weights_hash[:12]})", "ok" if same else "fail", fix=fix)
    if incoming.base_name == recipe.base.source:
        return Check("base", ours, incoming.base_name, "ok")
    fix = "it names another base: whether that is this one by another name only its shapes can tell"
    return Check("base", ours, incoming.base_name or "not said", "note", fix=fix)


def _head(facts: BaseFacts, incoming: Incoming) -> Check:
    rows = f"{facts.vocab_size} ids"
    if incoming.tokenizer is None:
        return Check("head width", rows, rows, "ok")
    size = _own_tokenizer(incoming).get_vocab_size(with_added_tokens=True)
    fix = "" if size <= facts.vocab_size else "its tokenizer has ids that the base's head lacks: take one made for this base"
    return Check("head width", rows, f"a tokenizer of {size} ids", "fail" if fix else "ok", fix=fix)


def lora_checks(old: LoraSection, new: LoraSection, facts: BaseFacts) -> list[Check]:
    """Whether a base can carry such an adapter."""
    wrong = dict([misfit(new.rank, new.targets, facts.linears) or ("", "")])
    ranks = [f"{lora.rank} (alpha {lora.alpha:g}{', rslora' if lora.rslora else ''})" for lora in (old, new)]
    targets = [lora.targets if isinstance(lora.targets, str) else ", ".join(lora.targets) for lora in (old, new)]
    targets = [text if len(text) < 60 else f"{text.count(',') + 1} modules" for text in targets]
    said = {"rank": ranks, "targets": targets}
    return [Check(key, a, b, "fail" if key in wrong else "ok", fix=wrong.get(key, "")) for key, (a, b) in said.items()]


def _engine(recipe: Recipe, agent: str, new: LoraSection) -> Check:
    """Checks the new adapter by the recipe's own rules about its engine."""
    kind = "DoRA" if new.dora else "LoRA"
    data = recipe.with_loras({}).model_dump()
    for section in data["team"]["agents"]:
        if section["name"] == agent:
            section["lora"] = new.model_dump()
    found = problems(data)
    fix = f"{found[0].wrong}; {found[0].fix}" if found else ""
    return Check("engine", recipe.rollout.engine, f"{kind} of rank {new.rank}", "fail" if fix else "ok", fix=fix)


def protocol_checks(recipe: Recipe, incoming: Incoming | None) -> list[Check]:
    """The paper's unification (app:pnp-protocol): what could be each agent's own habit must be the team's one rule."""
    protocol = recipe.team.protocol
    foreign = incoming is not None and incoming.foreign
    own = "its own habits" if foreign else "each its own"
    refused: Verdict = "fail" if recipe.swap.require_protocol else "note"

    def check(what: str, rule: str, unified: bool, fix: str) -> Check:
        return Check(what, rule, "the team's" if unified else own, "ok" if unified else refused, fix="" if unified else fix)

    system = "left to the chat template" if protocol.system is None else repr(protocol.system[:40])
    checks = [
        check("system text", system, protocol.system is not None, "set team.protocol.system to a text, or to '' for none"),
        check("reasoning tags", protocol.reasoning_tags, protocol.reasoning_tags == "strip" or not foreign,
              "set team.protocol.reasoning_tags=strip"),
        check("tool calls", protocol.tool_calls, protocol.tool_calls == "canonical" or not foreign,
              "set team.protocol.tool_calls=canonical"),
    ]  # fmt: skip
    if incoming is not None and incoming.manifest is not None:
        hashes = protocol_hash(recipe.team)[:12], incoming.manifest.protocol_hash[:12]
        same = hashes[0] == hashes[1]
        fix = "" if same else "it learned under another protocol, roles or router: Stage-0 teaches it this one"
        checks.append(Check("protocol", *hashes, "ok" if same else "note", fix=fix))
    return checks


def token_check(incoming: Incoming, tokenizer: Any, identity: Identity, strings: Sequence[str]) -> Check:
    """Token ids on strings of the team's contexts; without a tokenizer of its own an adapter is read by the base's."""
    if incoming.tokenizer is not None:
        return compare_tokenizers(tokenizer, _own_tokenizer(incoming), strings)
    if incoming.manifest is not None:
        ours, theirs = identity.tokenizer_hash, incoming.manifest.tokenizer_hash
        fix = "" if ours == theirs else "it was made with another tokenizer: take one made with this base's"
        return Check("token ids", ours[:12], theirs[:12], "ok" if ours == theirs else "fail", fix=fix)
    return Check("token ids", "the base's tokenizer", "the same", "ok")


def compare_tokenizers(ours: Any, theirs: Any, strings: Sequence[str]) -> Check:
    for text in strings:
        a, b = (_ids(tokenizer, text) for tokenizer in (ours, theirs))
        if a != b:
            place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            shown = text if len(text) <= 120 else f"{text[:117]}..."
            old, new = (f"{ids[place : place + 4]} at token {place}" for ids in (a, b))
            return Check("token ids", old, new, "fail", fix=f"the tokenizers differ on {shown!r}; both must give the same ids")
    return Check("token ids", f"{len(strings)} context strings", "the same ids", "ok")


def compare_vocabularies(old: Any, new: Any, *, extra: bool) -> Check:
    """Whether two tokenizers are one, beyond what some strings show: the first token, merge or rule that differs is named.

    `extra`: the new one may have tokens that the old one lacks.
    """
    tokens = [t.get_vocab() for t in (old, new)]
    want, have = ({index: token for token, index in vocabulary.items()} for vocabulary in tokens)
    only_new = sorted(index for index in have.keys() - want.keys() if have[index] not in tokens[0])
    for index in sorted(have.keys() | want.keys()):
        if have.get(index) != want.get(index) and not (extra and index in only_new):
            a, b = (f"id {index} is {t[index]!r}" if index in t else f"there is no id {index}" for t in (want, have))
            fix = f"the tokenizers differ on {want.get(index, have.get(index))!r}; take a base with the same one"
            if index in only_new:
                fix += ", or allow what only the new one has with --extra-tokens"
            return Check("vocabulary", a, b, "fail", fix=fix)
    rules = [_rules(t, only_new) for t in (old, new)]
    for name in rules[0] | rules[1]:
        a, b = (show(value) for value in _first_difference(*(t.get(name) for t in rules)))
        if a != b:
            return Check("vocabulary", a, b, "fail", fix=f"the tokenizers differ in their {name}; take a base with the same one")
    note = f"only the new one has {have[only_new[0]]!r} and {len(only_new) - 1} more" if only_new else ""
    return Check("vocabulary", f"{len(want)} tokens", f"{len(have)} tokens", "note" if note else "ok", fix=note)


def _rules(tokenizer: Any, without: Sequence[int]) -> dict[str, Any]:
    """How text becomes tokens, apart from their list; `without`: added tokens that are not compared."""
    rules: dict[str, Any] = {"end of a message": tokenizer.eos_token}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return rules
    told = json.loads(backend.to_str())
    model = {key: value for key, value in told["model"].items() if key not in ("vocab", "merges")}
    rules["merges"] = merges(told["model"])
    added = [{k: v for k, v in token.items() if k != "special"} for token in told.get("added_tokens") or []]
    rules["added tokens"] = [token for token in added if token["id"] not in without]
    return rules | {"model": model} | {key: _effective(told.get(key)) for key in ("normalizer", "pre_tokenizer", "decoder")}


def _effective(rule: Any) -> Any:
    """A rule without the settings that affect token offsets only: they change no ids."""
    if isinstance(rule, dict):
        return {key: _effective(value) for key, value in rule.items() if key != "trim_offsets"}
    return [_effective(value) for value in rule] if isinstance(rule, list) else rule


def _first_difference(old: Any, new: Any) -> tuple[Any, Any]:
    """The first differing entries of two lists, or the first differing key of two rules; (None, None) if they are equal."""
    if isinstance(old, list) and isinstance(new, list):
        return next((_first_difference(a, b) for a, b in zip_longest(old, new) if a != b), (None, None))
    if isinstance(old, dict) and isinstance(new, dict):
        found = next((key for key in sorted(old | new) if old.get(key) != new.get(key)), None)
        return (None, None) if found is None else ({found: old.get(found)}, {found: new.get(found)})
    return old, new


def _ids(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text, add_special_tokens=False)
    return list(encoded) if isinstance(encoded, list) else list(encoded.ids)


def _own_tokenizer(incoming: Incoming) -> Tokenizer:
    """From the bytes of tokenizer.json alone: data, no code."""
    assert incoming.tokenizer is not None
    try:
        return Tokenizer.from_str(incoming.tokenizer.decode())
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"--with {incoming.spec!r}: its tokenizer.json cannot be read ({str(error)[:120]})") from error
