"""The processes that work on one run together: who this one is, and the two things that they do with each other.

Every process (a rank) runs the same program. Work is dealt out in parts, each done by one rank; then all ranks have all results.
The processes are found in the variables that torchrun and accelerate's launcher set. One process is the same without a peer.
"""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from teamtr_lora.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

# A rank may wait for the slowest one's rollout; one that has died is noticed at once, when its connections close.
LONGEST_WAIT = timedelta(hours=6)
# Whoever started the processes ends them all when one fails, and tells more about it than one that only lost its peer.
GRACE_SECONDS = 2.0
GPUS_EACH = "TEAMTR_LORA_GPUS_EACH"  # environment variable: GPUs of one process, where vLLM splits its base over several
_FROM_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
                   "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


class Ranks:
    """One process alone; `_Group` is one of several."""

    rank = 0
    size = 1
    shared_gpu = False  # several of the processes use one GPU
    helping = False  # the first process carries the command out, and the others only help it to play episodes
    threads: int | None = None  # of this process on a CPU: so many; 0: one if the base is small; None: as torch has them

    def __init__(self) -> None:
        self._waited, self._since = 0.0, time.monotonic()

    @property
    def first(self) -> bool:
        """This is the one that prints, writes and decides."""
        return self.rank == 0

    @property
    def helped(self) -> bool:
        """The others wait for this one to broadcast what they are to do next; None is the end."""
        return self.helping and self.first

    def gather(self, value: T) -> list[T]:
        """What every rank has given, in their order."""
        return [value]

    def add_up(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks. Of integers, or of numbers of which one rank at most has each: sums of
        others would depend on how the work was dealt."""

    def announce_failure(self) -> bool:
        """Whether this rank is the first that fails: the one that tells its user why."""
        return True

    def outlast(self) -> None:
        """After a failure was told: the others must still be able to ask whether it was."""

    def broadcast(self, value: T) -> T:
        """What the first rank has given."""
        return self.gather(value)[0]

    def check_equal(self, value: Any, what: str) -> None:
        """Stops the run where ranks differ: from here on they would do different things."""
        values = self.gather(value)
        odd = [rank for rank, other in enumerate(values) if other != values[0]]
        if odd:
            raise UserError(f"rank {odd[0]} has {values[odd[0]]} and rank 0 has {values[0]} as {what}; the run is stopped")

    def make_global(self) -> None:
        """Makes torch's global group of these processes, which only what splits a base needs."""

    def take_turns(self) -> Iterator[bool]:
        """True in this rank's turn; no two ranks have theirs at a time."""
        for turn in range(self.size):
            yield turn == self.rank
            self.gather(None)

    def idle_share(self) -> float:
        """The share of the time since it was last asked that a rank has waited for others, as a mean over the ranks."""
        now = time.monotonic()
        shares = self.gather(self._waited / max(now - self._since, 1e-9))
        self._waited, self._since = 0.0, time.monotonic()
        return min(1.0, sum(shares) / self.size)


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that does each part: the dearest part first, to whoever has least so far."""
    loads, owners = [0.0] * ranks, [0] * len(costs)
    for part in sorted(range(len(costs)), key=lambda part: -costs[part]):
        owners[part] = loads.index(min(loads))
        loads[owners[part]] += costs[part]
    return owners


class _Group(Ranks):
    """Gloo's sockets carry everything but large sums on GPUs, which go through NCCL where every rank has a GPU of its own.

    The groups are objects of this class and not torch's global one, which a vLLM in this process makes and ends for itself.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        from torch import distributed

        super().__init__()
        self.rank, self.size, self._store = rank, size, store
        self._nccl: Any = None
        with self._peers():
            self._gloo: Any = distributed.ProcessGroupGloo(distributed.PrefixStore("gloo", store), rank, size, LONGEST_WAIT)

    def use_gpu(self, local_rank: int) -> None:
        """From here on this process sees its own GPU (or GPUs) only, so that nothing in it can take another rank's."""
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]
        each = int(os.environ.get(GPUS_EACH) or 1)
        own = (
            [names[n % len(names)] for n in range(local_rank * each, (local_rank + 1) * each)] if names and visible != "" else []
        )
        mine = ",".join(own)
        if mine:
            os.environ["CUDA_VISIBLE_DEVICES"] = mine
        places = self.gather((socket.gethostname(), mine))
        self.shared_gpu = bool(mine) and len(set(places)) < self.size
        if all(gpu for _, gpu in places) and len(set(places)) == self.size:
            store = torch.distributed.PrefixStore("nccl", self._store)
            nccl: Any = torch.distributed.ProcessGroupNCCL
            self._nccl = nccl(store, self.rank, self.size, nccl.Options())

    @contextmanager
    def _peers(self) -> Iterator[None]:
        """Waiting for others; one of them may be gone."""
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            time.sleep(GRACE_SECONDS)
            raise UserError(
                f"rank {self.rank} has lost another of the run's {self.size} processes; every checkpoint is intact"
            ) from error
        finally:
            self._waited += time.monotonic() - started

    def gather(self, value: T) -> list[T]:
        import torch

        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.long) for _ in range(self.size)]
        with self._peers():
            self._gloo.allgather([lengths], [torch.tensor([len(data)])]).wait()
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(data)] = data
            found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
            self._gloo.allgather([found], [padded]).wait()
        return [pickle.loads(part[: int(n)].numpy().tobytes()) for part, n in zip(found, lengths, strict=True)]

    def add_up(self, tensor: Tensor) -> None:
        with self._peers():
            if tensor.is_cuda and self._nccl is not None:
                self._nccl.allreduce([tensor]).wait()
            else:
                host = tensor.cpu()
                self._gloo.allreduce([host]).wait()
                tensor.copy_(host)

    def make_global(self) -> None:
        from torch import distributed

        if self.shared_gpu:
            raise UserError("training.shard: processes share a GPU, and a base is split over several; start one process a GPU")
        if not distributed.is_initialized():
            backend = "gloo" if self._nccl is None else "cpu:gloo,cuda:nccl"
            store = distributed.PrefixStore("global", self._store)
            distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=LONGEST_WAIT)

    def announce_failure(self) -> bool:
        with suppress(RuntimeError):  # the store is gone with whoever held it
            if self._store.add("failures", 1) > 1:
                # or the launcher, seeing this one end, would cut the other off in the middle of its line
                time.sleep(GRACE_SECONDS)
                return False
        return True

    def outlast(self) -> None:
        if self.first:  # it holds the store that they ask
            time.sleep(GRACE_SECONDS)


def started_by_launcher() -> bool:
    """Whether torchrun, accelerate's launcher or we ourselves have started this process together with others."""
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ


@cache
def process_ranks() -> Ranks:
    """This process among those that were started with it. The launcher's variables are taken out of the environment: accelerate,
    vLLM and programs that we start would each make a group of their own from them, or wait for torchrun's store."""
    if not started_by_launcher():
        return Ranks()
    from torch import distributed

    local_rank = int(os.environ.get("LOCAL_RANK") or 0)
    store, rank, size = next(distributed.rendezvous("env://", timeout=timedelta(minutes=10)))
    for name in [name for name in os.environ if name in _FROM_LAUNCHERS or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    group = _Group(store, rank, size)
    group.use_gpu(local_rank)
    return group
