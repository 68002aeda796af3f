"""The smallest KL that each pass can measure, for one base on this machine.

    .venv/bin/python tools/measure_floors.py [BASE] [--device auto] [--precisions fp16] [--message-tokens 64] [--json FILE]

BASE is anything base.source accepts. It is loaded in every precision that makes sense on the device, of those in --precisions;
per pass there are two readings, both of the exact KL summed over a message, in nats:
- floor: what a run measures for itself at start-up (teamtr_lora/training/floor.py); a delta below five times its gate's is
  refused
- resolves: from a scan of its own. A fresh agent is moved by alpha along one random direction; as long as a pass resolves the
  KL, KL / alpha^2 stays what the strict float32 pass finds. This is the smallest KL for which it does, within a factor of two
Messages are sampled to their full length, past any end token, so that the numbers of different bases compare.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.frozen_base import resolve_device
from teamtr_lora.common.errors import UserError
from teamtr_lora.recipe import BaseSection, RolloutSection, TeamSection, TeamTRConfig, TrustRegionSection
from teamtr_lora.rollout.playable import PlayableTeam, open_team
from teamtr_lora.rollout.sampler import Request, SamplingParams, derive_seed
from teamtr_lora.team import Episode, Message, agent_sequences
from teamtr_lora.training.batches import MessageBatch
from teamtr_lora.training.floor import measure_floors, perturbed_kl
from teamtr_lora.training.gate import gate_pass
from teamtr_lora.training.scoring import Scorer

AGENT = "agent"
PRECISIONS = ("fp32", "fp16", "bf16")
ALPHAS = tuple(10.0**-power for power in range(8))
REFERENCE = 1e-2  # small enough for the KL to be quadratic, large enough for strict float32 to see it well
HALF_ON_CPU = "a CPU rounds half precision in other places than a GPU: its floor would say nothing of one"
TRAINING = TeamTRConfig().training


@dataclass(frozen=True)
class PassReading:
    base: str  # the precision the weights are stored in
    name: str  # training, gate fp32 or gate tf32
    floor: float
    scan: dict[float, float]  # mean message KL by alpha

    def resolves(self, reference: PassReading) -> float | None:
        """The smallest KL of the scan, going down, that is still in proportion to alpha^2; None: not even the first one is."""
        constant = reference.scan[REFERENCE] / REFERENCE**2
        smallest = None
        for alpha, kl in self.scan.items():
            if alpha == 1:  # far enough to leave the quadratic range
                continue
            if not 0.5 < kl / (constant * alpha**2) < 2:
                break
            smallest = kl
        return smallest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="nano")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of the stored weights")
    parser.add_argument("--message-tokens", type=int, default=64)
    parser.add_argument("--messages", type=int, default=16)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    try:
        device = resolve_device(args.device)
    except UserError as error:
        sys.exit(f"measure_floors: {error}")
    skipped = {"fp16": HALF_ON_CPU, "bf16": HALF_ON_CPU} if device.type == "cpu" else {}
    skipped = {precision: why for precision, why in skipped.items() if precision in args.precisions}
    precisions = [precision for precision in args.precisions if precision not in skipped]
    readings, failed = measure(args.base, str(device), precisions, messages=args.messages, tokens=args.message_tokens)
    skipped |= failed
    if readings:
        print(f"{args.base} on {device}: {args.messages} messages of {args.message_tokens} tokens\n")
        print(tables(readings))
    for precision, why in skipped.items():
        print(f"{precision}: skipped; {why}")
    if args.json:
        facts = {name: getattr(args, name) for name in ("base", "messages", "message_tokens")}
        facts |= {"device": str(device), "torch": torch.__version__, "skipped": skipped}
        facts["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
        facts["passes"] = [asdict(r) | {"resolves": r.resolves(strict_of(readings, r.base))} for r in readings]
        args.json.write_text(json.dumps(facts, indent=2) + "\n")
    sys.exit(0 if readings else 1)


def measure(
    base: str, device: str, precisions: list[str], *, messages: int, tokens: int
) -> tuple[list[PassReading], dict[str, str]]:
    """All passes of all precisions, on the same messages, moved along the same direction; and what could not be loaded."""
    readings: list[PassReading] = []
    episodes: list[Episode] = []
    failed: dict[str, str] = {}
    for precision in precisions:
        try:
            playable = open_team(
                BaseSection(source=base, precision=precision, device=device),  # type: ignore[arg-type]
                TeamSection.model_validate({"agents": [{"name": AGENT, "role": "answers"}]}),
                RolloutSection(),
                seed=0,
                folder=Path.cwd(),
            )
            episodes = episodes or sample(playable, messages, tokens)
        except UserError as error:  # too large for this GPU, this base overflows in fp16, messages longer than its context
            failed[precision] = str(error)
            continue
        readings += list(read_passes(playable, episodes, precision))
        del playable  # before the next precision needs the memory
        gc.collect()
        torch.cuda.empty_cache()
    return readings, failed


def sample(playable: PlayableTeam, count: int, tokens: int) -> list[Episode]:
    """One message an episode; no stop ids, so each has all its tokens."""
    params = SamplingParams(1.0, tokens, ())
    episodes: dict[int, Episode] = {}
    for number in range(count):
        prompt = f"What is {number} plus {7 * number % 10}?"
        prompt_ids = playable.team.protocol.begin(prompt).prompt_for(AGENT)
        seed = derive_seed("floors", number)
        ticket = playable.sampler.submit(Request(prompt_ids, AGENT, params, seed))
        episodes[ticket] = Episode(str(number), number, prompt, seed)
        fresh: dict[str, Any] = {"token_ids": [], "sampler_logprobs": [], "version": "", "finish": "length", "text": ""}
        episodes[ticket].messages.append(Message(agent=AGENT, turn=0, prompt_ids=prompt_ids, **fresh))
    left = count
    while left:
        for done in playable.sampler.poll():
            if done.error:
                raise UserError(done.error)
            message = episodes[done.ticket].messages[0]
            message.token_ids, message.sampler_logprobs, message.version = done.token_ids, done.logprobs, done.version
            left -= 1
    return list(episodes.values())


def read_passes(playable: PlayableTeam, episodes: list[Episode], precision: str) -> Iterator[PassReading]:
    base, bank = playable.base, playable.bank
    for tf32 in (False, True) if base.device.type == "cuda" else (False,):
        how = {"head_chunk_tokens": TRAINING.head_chunk_tokens, "compiled": TRAINING.compile}  # as a run's passes are
        scorer = Scorer(base, bank, temperature=1.0, tf32=tf32, **how)  # type: ignore[arg-type]
        region = TrustRegionSection(gate_precision="tf32" if tf32 else "fp32")
        floors = measure_floors(scorer, bank, AGENT, episodes, region=region)
        sequences = agent_sequences(episodes, AGENT)
        if not tf32:
            as_trained = scorer.batch(sequences, segments=scorer.takes_segments)
            yield PassReading(precision, "training", floors["training"], scan(scorer, bank, as_trained, training_pass(scorer)))
        batch = scorer.batch(sequences)
        name = "gate tf32" if tf32 else "gate fp32"
        yield PassReading(precision, name, floors["gate"], scan(scorer, bank, batch, gate_pass(scorer)))


@contextmanager
def training_pass(scorer: Scorer) -> Iterator[None]:
    """The arithmetic of an update's passes, without their gradients."""
    with scorer.training(AGENT), torch.no_grad():
        yield


def scan(scorer: Scorer, bank: AdapterBank, batch: MessageBatch, passes: AbstractContextManager[None]) -> dict[float, float]:
    """The mean message KL from the fresh agent to itself at every alpha, inside the context that makes the pass."""
    bank.activate(AGENT)
    with passes:
        return dict(zip(ALPHAS, perturbed_kl(scorer, bank, AGENT, batch, "message_sum", ALPHAS), strict=True))


def strict_of(readings: list[PassReading], base: str) -> PassReading:
    return next(r for r in readings if r.base == base and r.name == "gate fp32")


def tables(readings: list[PassReading]) -> str:
    lines = [f"{'base':<6} {'pass':<10} {'floor':>10} {'resolves':>10}"]
    for r in readings:
        smallest = r.resolves(strict_of(readings, r.base))
        shown = f"> {r.scan[ALPHAS[1]]:.1e}" if smallest is None else f"{smallest:.1e}"
        lines.append(f"{r.base:<6} {r.name:<10} {r.floor:>10.1e} {shown:>10}")
    lines += ["", "KL / alpha^2, by alpha:", f"{'base':<6} {'pass':<10} " + " ".join(f"{alpha:>9.0e}" for alpha in ALPHAS)]
    for r in readings:
        lines.append(f"{r.base:<6} {r.name:<10} " + " ".join(f"{kl / alpha**2:>9.2e}" for alpha, kl in r.scan.items()))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
