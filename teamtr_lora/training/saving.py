"""What a run writes beside its next update: adapter versions, then the checkpoint that names them.

A checkpoint is copied when it is due and written on another thread. Until it is on the disk, the update that it is of does not
exist for a resumed run; whoever needs it there calls `settle`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from teamtr_lora.base.bank import AdapterBank
from teamtr_lora.base.versions import AdapterVersion, write_version
from teamtr_lora.runs.checkpoint import Optimizers
from teamtr_lora.runs.run_dir import RunDir
from teamtr_lora.runs.run_state import RunState
from teamtr_lora.training.optimizers import flatten_state

logger = logging.getLogger(__name__)


class Saver:
    """Of the one process that writes; `writes` is False in every other, where nothing happens."""

    def __init__(self, run_dir: RunDir, bank: AdapterBank, *, writes: bool) -> None:
        self._run_dir, self._bank, self._writes = run_dir, bank, writes
        self._disk = ThreadPoolExecutor(1)
        self._saving: list[Future[None]] = []
        self._versions: list[Callable[[], object]] = []  # that the next checkpoint names: each call writes one
        self._moments: Optimizers = {}  # as the last checkpoint has them, less those of agents that learned since

    def learned(self, agent: str) -> None:
        """The agent's version and moments are new: both are in the next checkpoint."""
        self._moments.pop(agent, None)
        if self._writes:
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._bank.tensors(agent).items()}
            version, config = self._bank.version(agent), self._bank.config(agent)
            self._versions.append(partial(write_version, self._run_dir.adapters, version, tensors, config))

    def save(self, state: RunState, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        """Begins to write the checkpoint of now."""
        if not self._writes:
            return
        for agent, optimizer in optimizers.items():
            if agent not in self._moments:
                self._moments[agent] = flatten_state(optimizer)
        writes = [*self._versions, self._run_dir.checkpoints.prepared(state, self._moments)]
        self._versions = []
        earlier, named = tuple(self._saving), (dict(state.versions), dict(state.loras))
        self._saving.append(self._disk.submit(self._write, earlier, writes, *named))

    def _write(
        self,
        earlier: Sequence[Future[None]],
        writes: list[Callable[[], object]],
        versions: dict[str, AdapterVersion],
        loras: dict[str, dict[str, Any]],
    ) -> None:
        for saving in earlier:  # a checkpoint names what these have written: where one has failed, it is not made
            saving.result()
        for write in writes:  # the checkpoint is the last: what it names is there
            write()
        self.tidy()
        self._run_dir.write_team(versions, loras)

    def tidy(self) -> None:
        """Removes the rollouts that no checkpoint names any more, also those that a kill has left."""
        self._run_dir.rollouts.keep_only(self._run_dir.checkpoints.named_rollouts())

    def settle(self) -> None:
        """Waits until the last checkpoint is on the disk."""
        while self._saving:
            self._saving.pop(0).result()

    def settle_versions(self) -> None:
        """Also those that no checkpoint names yet."""
        self.settle()
        while self._versions:
            self._versions.pop(0)()

    def close(self) -> None:
        """However the run has ended, what it has begun to write is written before another process may go on with it."""
        self._disk.shutdown()
        for saving in self._saving:  # the error that ended the run, if one did, is another
            if error := saving.exception():
                logger.warning("the last checkpoint could not be written: %s", error)
