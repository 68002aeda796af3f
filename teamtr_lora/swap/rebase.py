"""`rebase`: a whole team moved to another base with the same tokenizer (the paper's generation upgrade).

Every agent's old policy, on the old base, is distilled onto a fresh adapter of the new one. The old base is read once: what stays
of it are hidden states at the probe's message tokens and its head. The old team is never written to; the new one appears whole.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from teamtr_lora.base.frozen_base import BaseFacts, base_facts, base_identity, load_tokenizer
from teamtr_lora.base.precision import head_weight
from teamtr_lora.base.source import NANO, beside, resolve
from teamtr_lora.base.versions import AdapterVersion, content_hash, version_names, write_version
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import disk_errors, sync_folder
from teamtr_lora.common.locks import locked
from teamtr_lora.evaluation.contents import code_hashes
from teamtr_lora.recipe import LoraSection, Recipe, RecipeError
from teamtr_lora.recipe.problems import check
from teamtr_lora.rollout.playable import PlayableTeam, fits, load_versions, open_recipe
from teamtr_lora.runs.history import read_rebase
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.runs.work import Work
from teamtr_lora.swap.compatibility import (
    STRINGS,
    Check,
    compare_tokenizers,
    compare_vocabularies,
    lora_checks,
    protocol_checks,
    stop_on_failure,
)
from teamtr_lora.swap.newcomer import find_fresh, fresh_lora
from teamtr_lora.swap.places import Place
from teamtr_lora.swap.probe_contexts import Probe, context_strings, replayed
from teamtr_lora.swap.session import Session, scorer_for
from teamtr_lora.swap.shock import TeamScore, shock
from teamtr_lora.swap.stage0 import Alignment, Teacher, teacher_states
from teamtr_lora.swap.swap_report import Listener, RebaseOptions, RebaseReport

EARLY_STRINGS = 200  # prompts whose token ids are compared before a base is loaded


@contextmanager
def rebased(place: Place, options: RebaseOptions, *, listener: Listener | None = None) -> Iterator[RebaseReport]:
    """Rebases, and gives the report; when that has been dealt with, the work folder goes."""
    if not options.base.strip():
        raise UserError("--to: say which base the team moves to, as a recipe's base.source does")
    out = (options.out or place.beside(_short(options.base))).absolute()
    if os.path.lexists(out) and not (os.path.isdir(out) and read_rebase(out)):
        raise UserError(f"{out}: is there already; choose another --out")
    with disk_errors(out):  # a name too long for the disk
        work = Work(out.with_name(f".{out.name}.rebase"))
    rebase = _Rebase(place, options, out, work, listener=listener)
    rebase.look()  # before any file is made
    busy = "another process is moving a team here; wait for it or choose another --out"
    with locked(out.with_name(f".{out.name}.rebase.lock"), out, busy):
        with fits(rebase.recipe):
            report = rebase.run()
        yield report
        work.clear()


class _Rebase(Session):
    def __init__(self, place: Place, options: RebaseOptions, out: Path, work: Work, *, listener: Listener | None) -> None:
        held = place.read()
        recipe = options.applied(held.recipe)
        super().__init__(place.where, held, recipe, work=work, items=options.items, listener=listener)
        self.options, self.out = options, out
        self.agents = [agent.name for agent in self.recipe.team.agents]

    def run(self) -> RebaseReport:
        request = {
            "base": _local(self.options.base), "spec": self.options.spec, "swap": self.recipe.swap.model_dump(),
            "items": self.items, "extra_tokens": self.options.extra_tokens, "team": str(Path(self.where).absolute()),
            "from": {a: v.content_hash for a, v in self.held.versions.items()}, "contents": self.contents,
        }  # fmt: skip
        if self.out.exists():
            return self._found(request)
        self.work.begin(request)
        probe, before, teachers = self._leave_old_base()
        report = self._settle_on_new_base(probe, before, teachers)
        self._write(report, request)
        return report

    # --- steps

    def look(self) -> None:
        """What can be known of both bases without their weights."""
        _ = self.task  # what is wrong with it shows before a base is loaded
        self.listener.phase("looking at both bases")
        base = self.recipe.base
        old = resolve(beside(base.source, self.recipe.folder), base.revision)
        new = self._new_base()
        facts = base_facts(old), base_facts(new)
        checks = [Check("base", base.source, self.options.base, "ok"), _heads(*facts)]
        tokenizers = load_tokenizer(old, base.source), load_tokenizer(new, self.options.base)
        checks.append(compare_tokenizers(*tokenizers, self._early_strings()))
        checks.append(compare_vocabularies(*tokenizers, extra=self.options.extra_tokens))
        self._shared_ids = min(facts[0].vocab_size, facts[1].vocab_size)
        loras = self._loras(facts[1], checks)
        checks += protocol_checks(self.recipe, None)
        if any(c.verdict == "fail" for c in checks):
            self.listener.checks(checks)
            stop_on_failure(checks)
        bases = [base_identity(old), base_identity(new)]
        if bases[0] == bases[1]:
            raise UserError(
                f"--to {self.options.base}: {self.where} is on this base already (the same weights and tokenizer); give another "
                "one, or replace single adapters with swap"
            )
        self.new_recipe, self.checks = self._on_new_base(loras), checks
        # Part of the request: the same command with other weights or code under the same names is another rebase.
        self.contents = {"bases": bases, "code": code_hashes(self.recipe)}

    def _early_strings(self) -> list[str]:
        protocol = self.recipe.team.protocol
        texts = [protocol.system or "", *(agent.role for agent in self.recipe.team.agents)]
        texts += [item.prompt for item in self.task.first_items("train", EARLY_STRINGS)]
        return list(filter(None, texts))

    def _loras(self, facts: BaseFacts, checks: list[Check]) -> dict[str, LoraSection]:
        loras = {}
        for agent in self.recipe.team.agents:
            loras[agent.name] = fresh_lora(find_fresh(self.options.spec), agent.lora)
            found = lora_checks(agent.lora, loras[agent.name], facts)
            checks += [Check(f"{c.check} of {agent.name}", c.old, c.new, c.verdict, fix=c.fix) for c in found]
        return loras

    def _on_new_base(self, loras: dict[str, LoraSection]) -> Recipe:
        data = self.recipe.with_loras({name: lora.model_dump() for name, lora in loras.items()}).model_dump()
        data["base"] |= {"source": _local(self.options.base), "revision": None}
        data["output_dir"] = None
        recipe, problems = check(data)
        if recipe is None:
            raise RecipeError(problems, f"--to {self.options.base}")
        return recipe.placed_in(self.recipe.folder)

    def _new_base(self) -> Path:
        try:
            return resolve(_local(self.options.base), None)
        except UserError as error:  # which speaks of the key of a recipe
            raise UserError(f"--to {self.options.base}: {error}") from error

    def _leave_old_base(self) -> tuple[Probe, TeamScore, dict[str, list[Teacher]]]:
        """The probe, the old team's accuracy, and all that its policies are remembered by; the old base then goes."""
        self.listener.phase("loading the old base")
        with closing(open_recipe(self.recipe)) as playable:
            load_versions(playable, self.held.versions, self.held.adapters)
            probe = self.probe(playable, self.agents, ids=self._shared_ids)
            new = load_tokenizer(self._new_base(), self.options.base)
            tokenizer = playable.base.tokenizer
            found = compare_tokenizers(tokenizer, new, context_strings(probe, tokenizer, STRINGS))
            self.checks = [found if check.check == found.check else check for check in self.checks]  # of what agents really read
            self.listener.checks(self.checks)
            stop_on_failure(self.checks)
            # another chat template puts other tokens around the same messages: only those are then learned from
            self._same_contexts = tokenizer.chat_template == new.chat_template
            before = self.score("before", playable, self.recipe)
            head = head_weight(playable.base.model).detach().float().clone()
            return probe, before, {agent: self._teachers(playable, probe, agent, head) for agent in self.agents}

    def _teachers(self, playable: PlayableTeam, probe: Probe, agent: str, head: Tensor) -> list[Teacher]:
        """One a minibatch of the half to learn from, then one for the half that is held out."""
        self.listener.phase(f"reading {agent}'s policy")
        scorer = scorer_for(playable, self.recipe)
        playable.bank.activate(agent)
        with playable.training_memory():
            batches = self.batches(scorer, probe, agent, with_context=self._same_contexts)
            return [Teacher([state.cpu() for state in teacher_states(scorer, batch)], head) for batch in batches]

    def _settle_on_new_base(self, probe: Probe, before: TeamScore, teachers: dict[str, list[Teacher]]) -> RebaseReport:
        self.listener.phase("loading the new base")
        with closing(open_recipe(self.new_recipe)) as playable:
            direct = self.score("direct", playable, self.new_recipe)
            alignments = {}
            again = Probe(replayed(probe.episodes, playable.team.protocol))
            for agent in self.agents:
                alignments[agent] = self._align(playable, again, agent, teachers[agent])
                playable.publish(playable.bank.commit(agent))
            aligned = self.score("aligned", playable, self.new_recipe)
            self._tensors = {a: {n: t.cpu().clone() for n, t in playable.bank.tensors(a).items()} for a in self.agents}
            self._configs = {agent: playable.bank.config(agent) for agent in self.agents}
        scores = (before, direct, aligned)
        return RebaseReport(
            team=self.where,
            out=str(self.out),
            old_base=self.recipe.base.source,
            new_base=self.options.base,
            old_versions=version_names(self.held.versions),
            versions={agent: self._version(agent).name for agent in self.agents},
            checks=self.checks,
            alignments=alignments,
            before=before,
            direct=direct,
            aligned=aligned,
            shock_direct=shock(before, direct),
            shock_aligned=shock(before, aligned),
            sampled_tokens=probe.sampled_tokens + sum(score.sampled_tokens for score in scores),
            trained_tokens=sum(a.trained_tokens for a in alignments.values()),
            seconds=time.monotonic() - self.started,
        )

    def _align(self, playable: PlayableTeam, probe: Probe, agent: str, teachers: list[Teacher]) -> Alignment:
        scorer = scorer_for(playable, self.new_recipe)
        longest = max(len(m.prompt_ids) + len(m.token_ids) for e in probe.episodes for m in e.messages)
        if longest > playable.team.context_tokens:
            raise UserError(
                f"--to {self.options.base}: its context of {playable.team.context_tokens} tokens is shorter than the team's "
                f"transcripts ({longest}); choose another base"
            )
        batches = self.batches(scorer, probe, agent, with_context=self._same_contexts)
        with playable.training_memory():
            return self.align(f"agent-{agent}", agent, playable, scorer, adapter=agent, batches=batches, teachers=teachers)

    def _write(self, report: RebaseReport, request: dict[str, Any]) -> None:
        """A run directory, built out of sight and renamed into place."""
        built = self.work.folder / "result"
        shutil.rmtree(built, ignore_errors=True)
        run = RunDir(built)
        versions = {agent: self._version(agent) for agent in self.agents}
        for agent, version in versions.items():
            write_version(run.adapters, version, self._tensors[agent], self._configs[agent])
        run.write_recipe(self.new_recipe)
        run.write_team(versions, {})
        run.checkpoints.save(RunState(step=1, versions=versions), {})
        run.write_rebase(request, asdict(report))
        with disk_errors(self.out):
            os.rename(built, self.out)
            sync_folder(self.out.parent)

    # --- pieces

    def _version(self, agent: str) -> AdapterVersion:
        tensors: dict[str, Tensor] = self._tensors[agent]
        return AdapterVersion(agent, 0, content_hash(tensors, self._configs[agent]))

    def _found(self, request: dict[str, Any]) -> RebaseReport:
        """The report of a rebase that was killed after the new team was there."""
        record = read_rebase(self.out)
        if record is None or record["request"] != request or self.work.request() != request:
            raise UserError(f"{self.out}: is there already; choose another --out")
        report = TypeAdapter(RebaseReport).validate_python(record["report"])
        self.listener.checks(report.checks)
        return report


def _heads(old: BaseFacts, new: BaseFacts) -> Check:
    """Heads may differ in width: tokenizers leave rows unused, and bases round them up differently."""
    widths = f"{old.vocab_size} ids", f"{new.vocab_size} ids"
    shared = min(old.vocab_size, new.vocab_size)
    fix = "" if old.vocab_size == new.vocab_size else f"ids from {shared} on, which one head lacks, are masked and not probed"
    return Check("head width", *widths, "note" if fix else "ok", fix=fix)


def _local(source: str) -> str:
    """A folder or file by its whole path, so that it means the same from wherever the new run is used."""
    return str(Path(source).absolute()) if os.path.exists(source) and source != NANO else source


def _short(source: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in source.rstrip("/").rpartition("/")[2]) or "base"
