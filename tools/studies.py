"""The studies of tools/prove.py: which cells each has. The first variant of a study is what the others are compared with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import cells
import measure_swap
import oracle
import yaml
from budgets import Budget
from cells import Measures, Variant

from teamtr_lora.common.errors import UserError
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.training.trainer import TeamTRTrainer

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
QUICKSTART = (RECIPES / "quickstart.yaml",)
COUPLED = (RECIPES / "bases" / "nano.yaml", RECIPES / "tasks" / "distinct.yaml")
GSM8K = (RECIPES / "bases" / "qwen3_1.7b.yaml", RECIPES / "tasks" / "gsm8k.yaml")

NAMES = ("planner", "solver", "checker", "writer", "critic", "judge", "helper", "coder")
ROLES = ("ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions", "ten millions")
# Items of a stage: as near to 48 as the rollouts of every method can share them evenly.
ITEMS = {2: 48, 3: 48, 4: 48, 5: 45, 6: 48, 8: 48}
METHODS = {
    "teamtr": (),
    "no-reuse": ("training.reuse=none",),
    "naive": ("training.resampling=never",),
    "joint": ("training.resampling=never", "training.update=joint"),
    "importance": ("training.resampling=importance",),
    "every-2": ("training.resampling=every_k", "training.resample_every=2"),
    "no-region": ("trust_region.kind=none",),
}
# What has a budget per stage is compared at equal episodes, however often a method samples them anew.
STAGE_BUDGET = (
    "base.device=cpu", "training.matched=stage", "training.stages=15", "training.inner_epochs=2", "evaluation.every_stages=3",
    "evaluation.items=256", "diagnostics.save_episodes=none", "diagnostics.probe_every_stages=5", "diagnostics.probe_items=16",
    "diagnostics.probe_episodes_per_item=4", "diagnostics.token_shift_ranks=0",
)  # fmt: skip
QUIET = ("base.device=cpu", "diagnostics.save_episodes=none")
ABLATIONS = {
    "teamtr": (),
    "no-resampling": METHODS["naive"],
    "every-2": METHODS["every-2"],
    "importance": METHODS["importance"],
    "no-region": METHODS["no-region"],
    "penalty-fixed": ("trust_region.kind=penalty_fixed",),
    "penalty-adaptive": ("trust_region.kind=penalty_adaptive",),
    "radius-tenth": ("trust_region.delta=0.002",),
    "radius-tenfold": ("trust_region.delta=0.2",),
    "radius-adaptive": ("trust_region.kind=adaptive_radius",),
    "order-fixed": ("training.order=fixed",),
    "order-reverse": ("training.order=reverse",),
    "no-normalisation": ("training.advantage=no_norm",),
    "no-advantage-clip": ("training.advantage=no_clip",),
}
RATES = (2e-4, 6e-4, 2e-3, 6e-3)  # a 30-fold range
RATIOS, CLIPS = ("message", "token", "sequence_mean"), (0.1, 0.2, 0.5)
COLLAPSE = ("training.learning_rate=0.02", "training.inner_epochs=8", "training.stages=4", "evaluation.every_stages=1", *QUIET)
SHOCK_ITEMS, MORE_STAGES = 512, 3  # what a swap is judged on, and how long the team then trains on
PROTOCOLS = ("no_unification", "system_prompt", "reasoning_tags", "tool_calls", "full")


def studies(args: argparse.Namespace) -> dict[str, list[Variant]]:
    """All of them by name; those that need files of the user's are there when the command line names them."""
    found = {f"size-{size}": by_size(size) for size in ITEMS}
    found |= {f"coupled-{delta}": coupled(delta) for delta in ("0.02", "0.4")}
    gated = {"gate": (), "no-region": METHODS["no-region"]}
    found["collapse"] = variants(QUICKSTART, COLLAPSE, gated)
    rates = {f"{rate:g}": ("training.learning_rate=auto", f"training.initial_learning_rate={rate}") for rate in RATES}
    found["rates"] = variants(QUICKSTART, QUIET, rates)
    ratios = {f"{r}-{c}": (f"training.ratio={r}", f"training.clip_ratio={c}") for r in RATIOS for c in CLIPS}
    found["ratios"] = variants(QUICKSTART, QUIET, ratios)
    found["ablations"] = variants(QUICKSTART, (*STAGE_BUDGET, "rollout.items_per_stage=96"), ABLATIONS)
    found["objectives"] = objectives()
    found["oracle"] = [Variant("quickstart", QUICKSTART, QUIET, read_by_an_oracle)]
    found["upgrade"] = [swap_variant("agent", scratch=True, control=True)]
    if args.new_base:
        found["upgrade"].append(swap_variant("larger-base", scratch=True, control=True, to=str(args.new_base.absolute())))
    found["protocol"] = [swap_variant(name, recipe=RECIPES / "plug_and_play" / f"{name}.yaml") for name in PROTOCOLS]
    if args.base:
        found |= on_gsm8k(args)
    return {name: [_with(variant, name, args.overrides) for variant in own] for name, own in found.items()}


def _with(variant: Variant, study: str, overrides: Iterable[str]) -> Variant:
    return Variant(f"{study}/{variant.name}", variant.recipes, (*variant.overrides, *overrides), variant.work)


def variants(recipes: tuple[Path, ...], common: Iterable[str], changes: Mapping[str, Iterable[str]]) -> list[Variant]:
    return [Variant(name, recipes, (*common, *own)) for name, own in changes.items()]


def by_size(size: int) -> list[Variant]:
    """Teams whose every agent adds one column, by how a stage's episodes are sampled and used."""
    agents = [{"name": agent, "role": role} for agent, role in zip(NAMES[:size], ROLES, strict=False)]
    own = (f"team.agents={json.dumps(agents)}", f"task.digits={size}", "task.credit=columns")
    budget = (f"rollout.items_per_stage={ITEMS[size]}", "rollout.episodes_per_item=3")
    short = f"training.window={size - 1}"
    more = {"short-window": (short,), "newest-too": ("training.reuse=window_and_newest", short)}
    return variants(QUICKSTART, (*STAGE_BUDGET, *own, *budget), METHODS | more)


def coupled(delta: str) -> list[Variant]:
    """Four blind agents that must differ. With a small radius nothing is stale; with a large one everything is."""
    agents = json.dumps([{"name": name} for name in NAMES[:4]])
    own = (f"team.agents={agents}", f"trust_region.delta={delta}", "rollout.items_per_stage=96", "rollout.episodes_per_item=6")
    chosen = {name: METHODS[name] for name in ("teamtr", "no-reuse", "naive", "joint", "importance", "no-region")}
    more = {f"{name}-recombined": (*METHODS[name], "team.recombine=true") for name in ("no-reuse", "naive", "importance")}
    more["recombined"] = (*METHODS["teamtr"], "team.recombine=true")
    return variants(COUPLED, (*STAGE_BUDGET, *own), chosen | more)


def objectives() -> list[Variant]:
    """TeamTR against the same team trained in sequence with other objectives, at equal episodes per stage."""
    budget = (*STAGE_BUDGET, "rollout.items_per_stage=96")
    others = {name: (RECIPES / "baselines" / f"sequential_{name}.yaml",) for name in ("ppo", "grpo", "dapo")}
    return [Variant(name, recipes, budget) for name, recipes in {"teamtr": QUICKSTART, **others}.items()]


def on_gsm8k(args: argparse.Namespace) -> dict[str, list[Variant]]:
    """A real base: equal minutes and equal sampled tokens, against naive, no region and one agent, also trained by TRL's GRPO."""
    if args.data is None:
        raise UserError("--base: the studies of a real base need --data, a folder with GSM8K's train.jsonl.gz and test.jsonl.gz")
    files = [args.data.absolute() / f"{split}.jsonl.gz" for split in ("train", "test")]
    common = (
        f"base.source={args.base.absolute()}", "task.hub=null", f"task.path={files[0]}", f"task.test_path={files[1]}",
        "rollout.max_message_tokens=512", "training.gradient_checkpointing=false", "training.stages=1000",
        "evaluation.every_stages=0", "evaluation.items=16", "diagnostics.save_episodes=none",
        "rollout.items_per_stage=32", "training.learning_rate=3e-5", "training.schedule=constant", "trust_region.delta=0.05",
    )  # fmt: skip
    # the recipe's own: larger rollouts, and a rate that falls to nothing by the last stage, which the minutes do not move
    shipped = yaml.safe_load(GSM8K[1].read_text())
    falling = (
        f"rollout.items_per_stage={shipped['rollout']['items_per_stage']}", "rollout.requests_per_batch=1536",
        *(f"training.{key}={shipped['training'][key]}" for key in ("learning_rate", "schedule", "stages")),
        f"trust_region.delta={shipped['trust_region']['delta']}",
    )  # fmt: skip
    one = [{"name": "solver", "lora": {"rank": 16, "alpha": 32}}]
    three = yaml.safe_load(GSM8K[0].read_text())["team"]["agents"]
    hearing = ("team.router.kind=round_robin", "team.recombine=false")
    anew = ("training.resampling=every_update", "training.reuse=none")
    alone = (*hearing, *anew, f"team.agents={json.dumps(one)}")
    # two held-out groups tell how far TRL's step went: measuring more would take as long as the step
    grpo = (*alone, "training.learning_rate=2e-5", "trust_region.holdout=0.07")
    # as many messages as an agent of the recipe's team, and a rate that falls: half of the team's, as nothing shortens its steps
    grpo_falling = (*grpo, *falling, f"training.learning_rate={shipped['training']['learning_rate'] / 2:g}")
    in_turn = (*hearing, f"team.agents={json.dumps(three)}")
    in_turn_anew = (  # few long updates: 1,024 episodes of new items each
        *in_turn, *anew, "training.matched=stage", "rollout.items_per_stage=384", "training.learning_rate=auto",
        "training.minibatches_per_epoch=4", "trust_region.delta=0.1", "trust_region.step=fill",
    )  # fmt: skip
    spent = Budget(args.minutes_per_cell, args.tokens_per_cell)
    by_trl = Budget(args.minutes_per_cell, args.tokens_per_cell, trl=True)
    resampled = (  # before every update, and learned from twice
        "training.resampling=every_update", "training.matched=stage", "training.reuse=window", "training.window=2",
        "rollout.items_per_stage=48", "training.learning_rate=auto", "trust_region.step=fill",
    )  # fmt: skip
    methods = {name: METHODS[name] for name in ("teamtr", "naive", "no-region")}
    arms = {"falling": falling} | {f"falling-{name}": (*falling, *methods[name]) for name in ("naive", "no-region")} | methods
    arms |= {"resampled": resampled, "in-turn": in_turn, "in-turn-anew": in_turn_anew, "alone": alone}
    chosen = [Variant(name, GSM8K, (*common, *own), spent.work) for name, own in arms.items()]
    trained_by_trl = {"grpo": grpo, "grpo-falling": grpo_falling}
    few = (*common, *falling, "training.stages=5")  # whose rate falls to a fifth
    return {
        "gsm8k": [*chosen, *(Variant(name, GSM8K, (*common, *own), by_trl.work) for name, own in trained_by_trl.items())],
        "gsm8k-oracle": [Variant("teamtr", GSM8K, few, read_by_an_oracle)],
    }


def read_by_an_oracle(variant: Variant, seed: int, folder: Path, until: float) -> Measures:
    """A training run whose every candidate is read again on 768 episodes that nobody learns from."""
    run, verdicts = folder / "run", folder / "verdicts.jsonl"
    recipe = variant.recipe(seed, run)
    RunDir(run).check(recipe, resume=True)
    if not cells.finished(run, recipe):
        cells.told(variant, seed, run, until)
        cells.train(recipe, until, watch=lambda trainer: _watched(trainer, verdicts))
    return cells.measures(run, recipe) | oracle.verdict_shares(oracle.read_verdicts(verdicts))


def _watched(trainer: TeamTRTrainer, verdicts: Path) -> None:
    trainer.add_callback(oracle.Oracle(trainer, verdicts))


def swap_variant(
    name: str, *, recipe: Path = QUICKSTART[0], scratch: bool = False, control: bool = False, to: str | None = None
) -> Variant:
    """Trains a team, replaces one agent or moves it to another base, and trains on (tools/measure_swap.py)."""

    def work(variant: Variant, seed: int, folder: Path, until: float) -> Measures:
        asked = argparse.Namespace(
            recipe=recipe, overrides=list(variant.overrides), out=folder.parent, agent="solver", to=to, items=SHOCK_ITEMS,
            spec="fresh:rank=32,targets=all-linear", more_stages=MORE_STAGES, control=control, scratch=scratch,
        )  # fmt: skip
        found = measure_swap.measure(asked, seed, until)
        lost = {kind: found[f"lost_{kind}"] and found[f"lost_{kind}"]["lost"] for kind in ("direct", "aligned")}
        measured: Measures = {"before": found["trained"], "lost_direct": lost["direct"], "lost_aligned": lost["aligned"]}
        kept = lost["direct"] if lost["aligned"] is None else lost["aligned"]
        arms = {arm: found[arm] for arm in ("control", "scratch") if arm in found}
        return measured | {"shock": kept, "after": found["trained_on"]} | arms

    return Variant(name, (recipe,), QUIET, work)
