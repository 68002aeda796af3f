"""Optimizers of an agent's adapter: what each is made by, and what it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """One optimizer that a recipe may name; it is called with the parameters, `lr` and `weight_decay`."""

    words: str
    made_by: str  # module:class, imported when it is used
    state_bytes: int  # that it keeps of one weight
    trl: str  # its name in TRL's `optim`

    @property
    def exact(self) -> bool:
        """Whether the same step comes out the same on a CPU; those of bitsandbytes do not."""
        return self.made_by.startswith("torch.")


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(words="AdamW", made_by="torch.optim:AdamW", state_bytes=8, trl="adamw_torch"),
    "sgd": OptimizerKind(
        words="plain gradient steps: weights that hardly matter hardly move", made_by="torch.optim:SGD", state_bytes=0, trl="sgd"
    ),
    "adamw_8bit": OptimizerKind(
        words="AdamW, its moments in 8 bits", made_by="bitsandbytes.optim:AdamW8bit", state_bytes=2, trl="adamw_8bit"
    ),
    "paged_adamw_8bit": OptimizerKind(
        words="the same, moved to the CPU where memory is short",
        made_by="bitsandbytes.optim:PagedAdamW8bit",
        state_bytes=2,
        trl="paged_adamw_8bit",
    ),
}
