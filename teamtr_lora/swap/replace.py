"""`swap`: one agent's adapter replaced, with the steps and checks of app:align and app:pnp-protocol.

    compatibility -> probe -> (Stage-0) -> swap shock -> new team version

Every finished part is kept in the place's work folder until the report is out: killed at any moment, the old team or the new one
is there, and the same command goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from teamtr_lora.base.frozen_base import base_facts
from teamtr_lora.base.source import beside, resolve
from teamtr_lora.base.versions import content_hash, version_names
from teamtr_lora.common.errors import UserError
from teamtr_lora.common.files import sha256
from teamtr_lora.common.settings import known_agent
from teamtr_lora.evaluation.contents import code_hashes
from teamtr_lora.registry.identity import identify_folder
from teamtr_lora.registry.registry_store import Registry
from teamtr_lora.rollout.playable import PlayableTeam, fits, load_versions, open_recipe
from teamtr_lora.runs.work import Work
from teamtr_lora.swap.compatibility import STRINGS, Check, Fitting, fit_adapter, stop_on_failure, token_check
from teamtr_lora.swap.newcomer import Incoming, find_incoming
from teamtr_lora.swap.places import Place, Replacement
from teamtr_lora.swap.probe_contexts import Probe, context_strings
from teamtr_lora.swap.session import Session, scorer_for
from teamtr_lora.swap.shock import TeamScore, shock
from teamtr_lora.swap.stage0 import Alignment, Teacher, teacher_states
from teamtr_lora.swap.swap_report import Listener, SwapOptions, SwapReport


@contextmanager
def swapped(place: Place, options: SwapOptions, *, registry: Registry, listener: Listener | None = None) -> Iterator[SwapReport]:
    """Swaps, and gives the report; when that has been dealt with, the work folder goes."""
    with place.changing():
        swap = _Swap(place, options, registry, listener=listener)
        with fits(swap.recipe):
            report = swap.run()
        yield report
        swap.work.clear()


def plan_swap(place: Place, options: SwapOptions, *, registry: Registry, listener: Listener | None) -> SwapReport:
    """The compatibility report and what a swap would do; nothing is changed."""
    return _Swap(place, options, registry, listener=listener).plan()


class _Swap(Session):
    def __init__(self, place: Place, options: SwapOptions, registry: Registry, *, listener: Listener | None) -> None:
        held = place.read()
        recipe, work = options.applied(held.recipe), Work(place.work)
        super().__init__(place.where, held, recipe, work=work, items=options.items, listener=listener)
        self.place, self.options, self.registry = place, options, registry
        self.agent = known_agent(options.agent, [agent.name for agent in self.recipe.team.agents])
        self.candidate = _free_name([agent.name for agent in self.recipe.team.agents])

    # --- the two entrances

    def run(self) -> SwapReport:
        request = {**asdict(self.options), "swap": self.recipe.swap.model_dump(), "items": self.items}
        if (finished := self._finished(request)) is not None:
            return finished
        _ = self.task  # what is wrong with it shows before a base is loaded
        incoming, fitting = self._look()
        self.work.begin({**request, "from": version_names(self.held.versions), "contents": self._contents(incoming)})
        with closing(self._open(fitting)) as playable:
            return self._carry_out(playable, incoming, fitting)

    def plan(self) -> SwapReport:
        _ = self.task  # a plan that could not be carried out is none
        incoming, fitting = self._look()
        if incoming.tokenizer is not None:
            with closing(self._open(fitting)) as playable:
                self._compare_tokens(playable, incoming, fitting, self.probe(playable, [self.agent], keep=False))
        else:
            fitting.checks.append(token_check(incoming, None, self.identity, ()))
            self.listener.checks(fitting.checks)
            stop_on_failure(fitting.checks)
        swap = self.recipe.swap
        plan = []
        if self._needs_probe(incoming):
            plan.append(f"play the team until {self.agent} has spoken in {swap.probe_contexts} contexts")
        if swap.stage0:
            plan.append(
                f"align the new adapter until its held-out KL is within {self.radius:g}, in at most {swap.align_steps} steps"
            )
        times = "before, with the new adapter as it is, and aligned" if swap.stage0 else "before and after"
        plan.append(f"measure the team on {self.items} held-out items {times}")
        plan.append(f"replace {self.held.versions[self.agent].name} of {self.agent} in {self.place.where}")
        return self._report("dry run", fitting.checks, None, {}, plan=plan)

    # --- steps

    def _look(self) -> tuple[Incoming, Fitting]:
        """Everything that needs neither the base's weights nor an episode."""
        incoming = find_incoming(self.options.spec, self.registry, self.held.adapters / self.agent)
        if incoming.kind == "stored":
            incoming = self.place.known(incoming, self.agent)
        base = self.recipe.base
        source = beside(base.source, self.recipe.folder)
        folder = resolve(source, base.revision)
        self.identity = identify_folder(folder, source, base.revision)
        old = self.recipe.team.lora_of(self.agent)
        fitting = fit_adapter(self.recipe, old, self.agent, incoming, base_facts(folder), self.identity)
        if fitting.lora is None:
            self.listener.checks(fitting.checks)
            stop_on_failure(fitting.checks)
        return incoming, fitting

    def _open(self, fitting: Fitting) -> PlayableTeam:
        self.listener.phase("loading the base")
        assert fitting.lora is not None
        playable = open_recipe(self.recipe, {self.candidate: fitting.lora})
        try:
            load_versions(playable, self.held.versions, self.held.adapters)
            if fitting.tensors is not None:
                playable.bank.restore(self.candidate, fitting.tensors)
        except BaseException:
            playable.close()
            raise
        return playable

    def _carry_out(self, playable: PlayableTeam, incoming: Incoming, fitting: Fitting) -> SwapReport:
        probe = self.probe(playable, [self.agent]) if self._needs_probe(incoming) else None
        self._compare_tokens(playable, incoming, fitting, probe)
        recipe, stand_in = self.recipe, (self.agent, self.candidate)
        scores = {"before": self.score("before", playable, recipe)}
        scores["direct"] = self.score("direct", playable, recipe, stand_in=stand_in)
        alignment = None
        if recipe.swap.stage0:
            assert probe is not None
            alignment = self._align(playable, probe)
            scores["aligned"] = self.score("aligned", playable, recipe, stand_in=stand_in)
        return self._commit(playable, fitting, alignment, scores, probe)

    def _needs_probe(self, incoming: Incoming) -> bool:
        """To learn from, or to compare tokenizers on."""
        return self.recipe.swap.stage0 or incoming.tokenizer is not None

    def _compare_tokens(self, playable: PlayableTeam, incoming: Incoming, fitting: Fitting, probe: Probe | None) -> None:
        tokenizer = playable.base.tokenizer
        strings = context_strings(probe, tokenizer, STRINGS) if probe is not None and incoming.tokenizer is not None else []
        fitting.checks.append(token_check(incoming, tokenizer, self.identity, strings))
        self.listener.checks(fitting.checks)
        stop_on_failure(fitting.checks)

    def _align(self, playable: PlayableTeam, probe: Probe) -> Alignment:
        scorer = scorer_for(playable, self.recipe)
        with playable.training_memory():
            playable.bank.activate(self.agent)
            batches = self.batches(scorer, probe, self.agent)
            teachers = [Teacher(teacher_states(scorer, batch)) for batch in batches]
            return self.align("stage0", self.agent, playable, scorer, adapter=self.candidate, batches=batches, teachers=teachers)

    def _commit(
        self,
        playable: PlayableTeam,
        fitting: Fitting,
        alignment: Alignment | None,
        scores: dict[str, TeamScore],
        probe: Probe | None,
    ) -> SwapReport:
        bank = playable.bank
        how: Literal["stage0", "direct"] = "stage0" if alignment else "direct"
        assert fitting.lora is not None
        tensors = {name: tensor.cpu().clone() for name, tensor in bank.tensors(self.candidate).items()}
        config = bank.config(self.candidate)
        played = probe.sampled_tokens if probe else 0
        report = self._report(how, fitting.checks, alignment, scores, played, content_hash(tensors, config))
        measured = {
            "delta_align": alignment.delta if alignment else None,
            "kl_before": asdict(alignment.before) if alignment else None,
            "kl_after": asdict(alignment.after) if alignment else None,
            "steps": alignment.steps if alignment else 0,
            "curve": alignment.curve if alignment else [],
            "evaluation": scores["aligned" if alignment else "direct"].evaluation,
            "evaluation_before": scores["before"].evaluation,
            "evaluation_direct": scores["direct"].evaluation,
            "sampled_tokens": report.sampled_tokens,
            "trained_tokens": report.trained_tokens,
            "seconds": report.seconds,
        }
        self.work.put("report", asdict(report))
        versions = self.place.commit(
            Replacement(
                agent=self.agent,
                tensors=tensors,
                config=config,
                lora=fitting.lora,
                how=how,
                source=self.options.spec,
                measured=measured,
            )
        )
        report = replace(report, new=versions[self.agent], versions=versions)
        self.work.put("report", asdict(report))
        return report

    # --- pieces

    def _finished(self, request: dict[str, Any]) -> SwapReport | None:
        """The report of a swap that was killed after the team had changed."""
        begun, report = self.work.request(), self.work.get("report")
        if begun is None or report is None or {k: v for k, v in begun.items() if k not in ("from", "contents")} != request:
            return None
        if self.held.versions[self.agent].content_hash != report["content_hash"] or self._renewed(begun.get("contents")):
            return None
        versions = version_names(self.held.versions)
        restored = TypeAdapter(SwapReport).validate_python({**report, "versions": versions, "new": versions[self.agent]})
        self.listener.checks(restored.checks)
        return restored

    def _contents(self, incoming: Incoming) -> dict[str, Any]:
        """Hashes of what the request names: the same command with other weights or code behind the names is another swap."""
        base = self.identity.base.weights_hash
        return {"adapter": _file_hashes(incoming), "base": base, "code": code_hashes(self.recipe)}

    def _renewed(self, begun: dict[str, Any] | None) -> bool:
        """Whether `--with` now names another adapter than the one that was swapped in; false if that one was removed."""
        try:
            incoming = find_incoming(self.options.spec, self.registry, self.held.adapters / self.agent)
        except UserError:
            return False
        return begun is not None and begun["adapter"] != _file_hashes(incoming)

    def _report(
        self,
        how: str,
        checks: list[Check],
        alignment: Alignment | None,
        scores: dict[str, TeamScore],
        probe_tokens: int = 0,
        content: str | None = None,
        plan: list[str] | None = None,
    ) -> SwapReport:
        before, direct, aligned = (scores.get(name) for name in ("before", "direct", "aligned"))
        return SwapReport(
            team=self.place.where,
            agent=self.agent,
            source=self.options.spec,
            how=how,
            old=self.held.versions[self.agent].name,
            new=None,
            content_hash=content,
            versions=version_names(self.held.versions),
            checks=checks,
            alignment=alignment,
            before=before,
            direct=direct,
            aligned=aligned,
            shock_direct=shock(before, direct) if before and direct else None,
            shock_aligned=shock(before, aligned) if before and aligned else None,
            sampled_tokens=probe_tokens + sum(score.sampled_tokens for score in scores.values()),
            trained_tokens=alignment.trained_tokens if alignment else 0,
            seconds=time.monotonic() - self.started,
            plan=plan or [],
        )


def _free_name(names: list[str]) -> str:
    return next(name for name in ("candidate", *(f"candidate-{i}" for i in range(2, 99))) if name not in names)


def _file_hashes(incoming: Incoming) -> dict[str, str]:
    return {name: sha256(data) for name, data in (incoming.contents or {}).items()}
