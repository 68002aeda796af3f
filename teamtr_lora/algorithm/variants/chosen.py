"""All variants of one run, as its recipe chooses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from teamtr_lora.algorithm.variants.matched import MATCHED, Matched, stage_budget
from teamtr_lora.algorithm.variants.ordering import Ordering, ordering
from teamtr_lora.algorithm.variants.publishing import UPDATES, Publishing
from teamtr_lora.algorithm.variants.radii import RADII, Radii
from teamtr_lora.algorithm.variants.region import REGIONS, TrustRegion
from teamtr_lora.algorithm.variants.resampling import RESAMPLING, Resampling
from teamtr_lora.algorithm.variants.reuse import REUSE, SMALL_RADIUS, Reuse


@dataclass(frozen=True, kw_only=True)
class Variants:
    order: Ordering
    resampling: Resampling
    matched: Matched
    publishing: Publishing
    region: TrustRegion
    radii: Radii
    reuse: Reuse

    @classmethod
    def of(cls, config: Any) -> Self:
        """`config` has the sections `training` and `trust_region` of a recipe."""
        training, region = config.training, config.trust_region
        resampling, matched = RESAMPLING[training.resampling](training), MATCHED[training.matched]()
        return cls(
            order=ordering(training.order),
            resampling=resampling,
            matched=matched,
            publishing=UPDATES[training.update](),
            region=REGIONS[region.kind](region),
            radii=RADII[region.radii](),
            reuse=REUSE[training.reuse if resampling.always_fresh else "none"](
                region,
                None if training.window == "auto" else training.window,
                two_stages=matched.shared and region.delta <= SMALL_RADIUS,
            ),
        )


def learned_items(config: Any, agents: int) -> int:
    """The items that an update of a team of `agents` learns from, at most. `config` has the section `rollout` too."""
    _, played = stage_budget(config.training, config.rollout.items_per_stage, agents)
    return Variants.of(config).reuse.learned_items(played, agents)
