"""Messages between the processes of a cluster: vectors in parts, and trees of tensors and plain values.

Everything goes point to point, so the bytes a process sends are known and sums have one order. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, distributed

from fedloom.core.errors import UserError
from fedloom.engines.peers.transport import as_tensor
from fedloom.federation.rounds.worker import with_index
from fedloom.federation.runs.checkpoint import join_tree, split_tree

dist: Any = distributed  # its type stubs leave out part of what is used here

_PATIENCE = timedelta(hours=24)
"""The patience of a process with another: as long as a client may train. A process that dies is noticed at once."""


class Comm:
    """The connection of one process to the others of a cluster; all call the same methods in the same order.

    `device` is where vectors lie while they travel: the CPU (gloo), or this process's own GPU (NCCL, see `use`).
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.device = rank, size, torch.device("cpu")
        self.sent = 0  # bytes that this process sent to others

    @staticmethod
    def join() -> Comm:
        """Join the processes that torchrun started."""
        gpus = dist.is_nccl_available() and torch.cuda.is_available()
        store, rank, size = next(dist.rendezvous("env://", timeout=_PATIENCE))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if gpus else "gloo",
            store=dist.PrefixStore(meeting(store, rank, size), store),
            rank=rank,
            world_size=size,
            timeout=_PATIENCE,
        )
        return Comm(rank, size)

    def use(self, devices: Sequence[str]) -> str:
        """Return the device of this process; if every process has a GPU, vectors travel between GPUs (NCCL)."""
        local = int(os.environ.get("LOCAL_RANK", "0"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        mine = with_index(devices[local % len(devices)])
        own = torch.device(mine).type == "cuda" and len(set(devices)) >= here and dist.is_nccl_available()
        if all(self.all(own)):
            self.device = torch.device(mine)
            torch.cuda.set_device(self.device)
        return mine

    def leave(self) -> None:
        """Leave the other processes."""
        dist.destroy_process_group()

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first, so that processes do not all begin with the same rank."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def exchange(self, out: Mapping[int, Sequence[Tensor]], into: Mapping[int, Sequence[Tensor]]) -> None:
        """Send tensors to ranks and fill tensors from ranks, all at once. Empty tensors do not travel.

        Tensors for this process itself are copied. Each pair must agree on shapes, dtypes and order.
        """
        for source, target in zip(out.get(self.rank, ()), into.get(self.rank, ()), strict=True):
            target.copy_(source)
        operations, landed = [], []
        for rank in self.others:
            for tensor in out.get(rank, ()):
                if tensor.numel():
                    operations.append(dist.P2POp(dist.isend, _raw(tensor.detach().to(self.device).contiguous()), rank))
                    self.sent += tensor.nbytes
            for tensor in into.get(rank, ()):
                if tensor.numel():
                    direct = tensor.is_contiguous() and tensor.device == self.device
                    here = tensor if direct else torch.empty_like(tensor, device=self.device).contiguous()
                    operations.append(dist.P2POp(dist.irecv, _raw(here), rank))
                    if not direct:
                        landed.append((tensor, here))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for tensor, here in landed:
            tensor.copy_(here)

    def reduce(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Sum x over all processes, in the order of ranks; return this process's part, of `sizes` columns."""
        parts = x.split(list(sizes), dim=-1)
        mine = torch.empty((self.size, *parts[self.rank].shape), dtype=x.dtype, device=x.device)
        self.exchange({q: [parts[q]] for q in range(self.size)}, {q: [mine[q]] for q in range(self.size)})
        return sum(mine[1:], mine[0])

    def concat(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the parts of all processes side by side along the last dimension; `sizes` are their widths."""
        whole = part.new_empty((*part.shape[:-1], sum(sizes)))
        views = whole.split(list(sizes), dim=-1)
        self.exchange({q: [part] for q in range(self.size)}, {q: [views[q]] for q in range(self.size)})
        return whole

    def total(self, x: Tensor) -> Tensor:
        """Sum over all processes, to the same bits in each."""
        if self.size == 1:
            return x
        sizes = shares(x.numel(), self.size)
        return self.concat(self.reduce(x.reshape(-1), sizes), sizes).view(x.shape)

    def maximum(self, x: Tensor) -> Tensor:
        """Return the largest over all processes, value by value."""
        every = x.new_empty((self.size, *x.shape))
        self.exchange({q: [x] for q in range(self.size)}, {q: [every[q]] for q in range(self.size)})
        return every.amax(dim=0)

    def swap(self, out: Mapping[int, Any]) -> dict[int, Any]:
        """Exchange trees. `out` has those for other ranks; returns the tree of each rank that sent one, and its own."""
        received = self._carry(out, self.others, self.others)
        return {**received, **({self.rank: out[self.rank]} if self.rank in out else {})}

    def _carry(self, out: Mapping[int, Any], to: Sequence[int], sources: Sequence[int]) -> dict[int, Any]:
        """Exchange trees with some ranks: lengths, heads, tensors. A rank without a tree gets an empty head."""
        packed = {id(tree): _message(tree) for q, tree in out.items() if q != self.rank}
        messages = {q: packed[id(out[q])] if q in out else (torch.empty(0, dtype=torch.uint8), []) for q in to}
        lengths = {q: torch.zeros(1, dtype=torch.int64) for q in sources}
        ours = {q: [torch.tensor([len(head)])] for q, (head, _) in messages.items()}
        self.exchange(ours, {q: [n] for q, n in lengths.items()})
        heads = {q: torch.empty(int(n), dtype=torch.uint8) for q, n in lengths.items()}
        self.exchange({q: [head] for q, (head, _) in messages.items()}, {q: [head] for q, head in heads.items()})
        about = {q: json.loads(head.numpy().tobytes()) for q, head in heads.items() if len(head)}
        tensors = {
            q: [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in each["tensors"]]
            for q, each in about.items()
        }
        self.exchange({q: parts for q, (_, parts) in messages.items()}, tensors)
        return {q: join_tree(each["tree"], {str(i): t for i, t in enumerate(tensors[q])}) for q, each in about.items()}

    def all(self, tree: Any) -> list[Any]:
        """Return the trees of all processes, by rank."""
        trees = self.swap(dict.fromkeys(range(self.size), tree))
        return [trees[q] for q in range(self.size)]

    def send(self, rank: int, tree: Any) -> None:
        """Send a tree to a process that receives it."""
        self._carry({rank: tree}, [rank], [])

    def receive(self, rank: int) -> Any:
        """Return a tree from a process that sends it."""
        return self._carry({}, [], [rank])[rank]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Turn a UserError in one process into one in all of them."""
        error: UserError | None = None
        try:
            yield
        except UserError as problem:
            error = problem
        texts = [text for text in self.all(None if error is None else str(error)) if text is not None]
        if texts:
            raise error or UserError(texts[0])

    def to_first(self, tree: Any) -> list[Any]:
        """Return the trees of all processes, by rank, at rank 0; an empty list elsewhere."""
        if self.rank:
            self.send(0, tree)
            return []
        return [tree, *(self.receive(q) for q in range(1, self.size))]

    def from_first(self, trees: Sequence[Any]) -> Any:
        """Return the tree that rank 0 has for this rank; `trees` of other ranks is ignored."""
        if self.rank:
            return self.receive(0)
        for q in range(1, self.size):
            self.send(q, trees[q])
        return trees[0]


def meeting(store: Any, rank: int, size: int) -> str:
    """Agree on a name that only these processes know; they exchange their addresses under it.

    torchrun keeps its store when it restarts processes, with the addresses of the old ones. So rank 0 makes up a name
    and sends it to each process that shows a word made up just now.
    """
    word = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", word)
        name = str(store.get(f"welcome/{rank}/{word}").decode())
        store.set(f"{name}/met/{rank}", "1")
        return name
    answered: dict[int, bytes] = {}
    waiting = set(range(1, size))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"{word}/met/{other}"]):
                waiting.discard(other)
            elif store.check([f"hello/{other}"]) and (said := store.get(f"hello/{other}")) != answered.get(other):
                answered[other] = said  # perhaps the word of an old process, which will not answer
                store.set(f"welcome/{other}/{said.decode()}", word)
        time.sleep(0.01)
    return word


def shares(total: int, parts: int) -> list[int]:
    """Return the sizes of `parts` consecutive parts of `total` things, as equal as possible."""
    return [b - a for a, b in pairwise(total * i // parts for i in range(parts + 1))]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Return the start of each part, and the end of the last."""
    return [0, *accumulate(sizes)]


def _raw(tensor: Tensor) -> Tensor:
    """Return the same memory as bytes, because not every backend knows every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _message(tree: Any) -> tuple[Tensor, list[Tensor]]:
    """Return (head as bytes, tensors); a tensor that is several times in the tree is sent once."""
    skeleton, tensors = split_tree(tree, once=True)
    about = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in tensors.values()]
    return as_tensor(json.dumps({"tree": skeleton, "tensors": about}).encode()), [*tensors.values()]
