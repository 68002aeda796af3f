"""Sharing a GPU between the trainer and vLLM: the engine sleeps during updates where memory is short."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from teamtr_lora.base.memory import free_bytes, reset_peak

SKIPPED_BYTES = 2**24  # an update that took no more than this was skipped, and does not show what one needs


class SharedMemory:
    """Lends the engine's GPU memory to the trainer between rollouts: sleep before an update, wake before the next request.

    `auto` lets the engine sleep only where the memory left beside it is less than an update has needed so far, or may need by
    the memory model. Before the end of the first update the former is not known, and it sleeps.
    """

    def __init__(
        self,
        engine: Any,
        device: torch.device,
        offload: Literal["auto", "never", "always"],
        *,
        taken: int = 0,
        before_sleep: Callable[[], None],
    ) -> None:
        self._engine, self._device, self._before_sleep = engine, device, before_sleep
        self._offload = offload if device.type == "cuda" else "never"
        self._taken = taken  # bytes that the engine has
        self._needed: int | None = None
        self.asleep = False

    @contextmanager
    def lent(self, *, measured: bool = True, least: int = 0) -> Iterator[None]:
        """Around an update, which tells what the next ones need. Not `measured`: around less than one. `least`: bytes that it may
        take by the memory model, whatever earlier ones took: theirs may have had fewer messages."""
        if self._offload == "never":
            yield
            return
        if self._offload == "always" or self._needed is None or free_bytes(self._device) < max(1.2 * self._needed, least):
            self._sleep()
        before = torch.cuda.memory_allocated(self._device)
        reset_peak(self._device)
        try:
            yield
        finally:
            needed = torch.cuda.max_memory_allocated(self._device) - before
            if measured and needed > SKIPPED_BYTES:
                self._needed = max(self._needed or 0, needed)

    @property
    def lendable(self) -> int:
        """Bytes that a sleeping engine leaves to the trainer; 0 where it never sleeps."""
        return 0 if self._offload == "never" else self._taken

    def wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # the engine needs the memory that the trainer's allocator has cached
            self._engine.wake_up()
            self.asleep = False

    def close(self) -> None:
        self._engine, self._before_sleep, self._offload = None, lambda: None, "never"

    def _sleep(self) -> None:
        if not self.asleep:
            self._before_sleep()
            self._engine.reset_prefix_cache()  # the blocks are given up
            self.asleep = True  # first: vLLM may fail when it has half gone to sleep, and is to be woken then
            self._engine.sleep(level=1)  # weights, adapters among them, wait in CPU memory
