"""Guards that detect non-finite or corrupted values, report these values, and stop the run.

All ranks raise the same `GuardError` at the same step: before the update if numbers are not finite
or if matrix products or messages are corrupt, and after the step if replicas differ. The exception
on each rank contains the findings of that rank.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc3d.arrays.pool import on_host, to_host
from hpc3d.comm.mesh import COPIES
from hpc3d.console.exit_codes import CHECK_FAILED, NOT_FINITE
from hpc3d.training.optimizers.outer import common_kinds

if TYPE_CHECKING:
    from hpc3d.arrays.array import Array
    from hpc3d.comm.communicator import Communicator
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import GuardConfig
    from hpc3d.model.parameters import Parameter
    from hpc3d.tensor.layout import Layout
    from hpc3d.training.optimizers.optimizer import StateSpec

SHOWN = 10  # maximum number of findings in a report


class GuardFinding(NamedTuple):
    """One line of an error report. The line with the smallest `order` is closest to the cause."""

    order: int
    line: str


class GuardError(Exception):
    """Raised on all ranks if any rank detects a non-finite or corrupted value.

    `found` lists this rank's findings.
    """

    def __init__(self, found: list[GuardFinding]) -> None:
        super().__init__(f"{len(found)} findings on this rank")
        self.found = found


class NotFinite(GuardError):
    code = NOT_FINITE
    what = "not finite"


class Corrupt(GuardError):
    code = CHECK_FAILED
    what = "corrupted"


def guarded(mesh: Mesh, guard: GuardConfig) -> Mesh:
    """Add checks of matrix products and messages to the mesh if `guard` enables them."""
    every = guard.abft_every
    if not every:
        return mesh
    from hpc3d.comm.abft.checker import AbftChecker

    return mesh.guarded(AbftChecker(mesh.rank, every))


def lines(wrong: GuardError, found: Sequence[Sequence[GuardFinding]]) -> list[str]:
    """Return the report lines for the findings of all ranks, closest to the cause first.

    `found` has one list per rank.
    """
    findings = sorted(chain.from_iterable(found), key=lambda finding: finding.order)
    shown = [finding.line for finding in findings[:SHOWN]]
    more = len(findings) - len(shown)
    head = f"{wrong.what}: {len(findings)} found"
    return [head, *shown, *([f"and {more} more"] if more else [])]


def stop(mesh: Mesh, found: list[GuardFinding], kind: type[GuardError] = Corrupt) -> None:
    """Mark each finding in this rank's trace, and raise an exception of type `kind`."""
    for finding in found:
        mesh.trace.mark(f"guard: {finding.line}")
    raise kind(found)


def _on_any_rank(mesh: Mesh, count: int) -> bool:
    return bool(mesh.world.all_reduce(np.array([float(count)]), "max").wait()[0])


def refuse(trainer: Any) -> None:
    """Raise an error that explains a non-finite loss or gradient norm, or a failed check."""
    mesh, corrupt = trainer.mesh, [GuardFinding(0, line) for line in trainer.mesh.guard.found]
    if _on_any_rank(mesh, len(corrupt)):
        stop(mesh, corrupt)
    stop(mesh, _not_finite(trainer), NotFinite)


def _not_finite(trainer: Any) -> list[GuardFinding]:
    """Return this rank's findings about non-finite numbers.

    If any parameter is not finite, only parameters are reported. Otherwise, a non-finite
    contribution of this rank to the loss is reported, as are the non-finite gradients in the
    deepest layer with such gradients. If the contribution and all gradients are finite, an
    overflow of the sum of squared gradients is reported.
    """
    where = f"rank {trainer.mesh.rank}: step {trainer.number}, "
    values = [item for item in trainer.parameters if _count_not_finite(item.value)]
    if values:
        return [GuardFinding(0, where + _described(item, item.value, "value")) for item in values]
    found = []
    if not np.isfinite(trainer.local_loss):
        what = f"the rank's contribution to the loss is {trainer.local_loss}"
        found.append(GuardFinding(1, where + what))
    trained = [item for item in trainer.parameters if not item.frozen]
    grads = [item for item in trained if _count_not_finite(item.grad)]
    last = max(map(_depth, grads), default=None)
    found += [
        GuardFinding(2 + _FAR - last, where + _described(item, item.grad, "gradient"))
        for item in grads
        if _depth(item) == last
    ]
    if not found and not np.isfinite(trainer.squares):
        found.append(
            GuardFinding(2 + 2 * _FAR, f"{where}the rank's sum of squared gradients overflows")
        )
    return found


_FAR = 1 << 20  # larger than the index of any layer


def _depth(item: Parameter) -> int:
    """Return a parameter's depth in the model. The backward pass starts at the largest depth."""
    words = item.name.split(".")
    return int(words[1]) if words[0] == "layers" else _FAR if words[0] == "head" else -1


def _count_not_finite(block: Array) -> int:
    return block.size - int(np.isfinite(on_host(block)).sum())


def _described(item: Parameter, block: Array, kind: str) -> str:
    layer, _, name = item.name.removeprefix("layers.").partition(".")
    where = f"layer {layer}, {name}" if item.name.startswith("layers.") else item.name
    count = _count_not_finite(block)
    return f"{where}: {count} of {block.size} elements of its {kind} are not finite"


class ReplicaCheck:
    """Check that compares replicated blocks between ranks after every `every`-th step (0: never).

    Replicas of parameters and optimizer states must be bitwise identical. The check compares their
    64-bit hashes. With local updates, the interval is rounded up to a multiple of H steps, because
    the workers have the same parameters only after an agreement; with stale agreements, only after
    the last step. The states of their inner optimizers always differ.
    """

    def __init__(self, trainer: Any, every: int) -> None:
        self.trainer, self.mesh = trainer, trainer.mesh
        self.local = trainer.config.parallel.local_steps
        self.every = -(-every // self.local) * self.local if self.local else every
        self.axes = [axis for axis in self.mesh.sizes if self.mesh.size(axis) > 1]

    def after(self, number: int) -> None:
        """Check the replicas after step `number`; raise Corrupt on all ranks if any differ."""
        if not self.every or (number + 1) % self.every:
            return
        self.trainer.buckets.complete()
        with self.mesh.trace.span("hashes of replicas"):
            outer = self.trainer.outer
            copies = self.copies(outer is None or outer.is_agreed(number))
        found = [finding for axis in self.axes for finding in self.along(axis, number, copies)]
        if self.trainer.has_tied_ends and not self.trainer.alone:
            found += self._tied_copies(number, copies)
        if _on_any_rank(self.mesh, len(found)):
            stop(self.mesh, found)

    def copies(self, agreed: bool) -> dict[tuple[str, str], tuple[set[str], int]]:
        """Return a dict that maps (name, kind) to (replication axes, hash) of this rank's blocks.

        Only blocks that other ranks store as well are included: replicas, and the two copies of a
        tied embedding table on two pipeline stages. `agreed` is as in `common_kinds`.
        """
        alone = {COPIES} if self.local else set()
        common = common_kinds(agreed)
        host = odd_numbers(_FACTORS)
        factors = self.mesh.pool.bring(host)
        return {
            (item.name, kind): (
                axes,
                hash_of(block, factors if isinstance(block, type(factors)) else host),
            )
            for item, kind, replicated, block in self.blocks()
            for axes in [replicated - (set() if kind in common else alone)]
            if axes or item.tied_peer is not None
        }

    def blocks(self) -> Iterator[tuple[Parameter, str, set[str], Array]]:
        """Yield (parameter, array name, replication axes, block) for all blocks on this rank."""
        parameters, optimizer = self.trainer.parameters, self.trainer.optimizer
        for item in parameters:
            axes = self._replicated(item.layout)
            yield item, "value", axes, item.value
            own = axes.difference(item.replicas) if parameters.shared_out(item) else axes
            for spec, state in optimizer.states_of(item):
                yield item, spec.name, own | self._reduced(item, spec), state

    def _reduced(self, item: Parameter, spec: StateSpec) -> set[str]:
        """Return the axes that shard a matrix but not its optimizer state, which is replicated."""
        layout = item.updated_layout
        return self._replicated(spec.layout(layout)) - self._replicated(layout)

    def _replicated(self, layout: Layout) -> set[str]:
        """Return the axes along which ranks hold the same block of a parameter."""
        return {*self.axes} - {axis for dim in layout for axis in dim} - {*layout.owned, "p"}

    def along(
        self, axis: str, number: int, copies: Mapping[tuple[str, str], tuple[set[str], int]]
    ) -> Iterator[GuardFinding]:
        """Compare replicas along an axis, and yield the differences on one rank of each group."""
        keys = [key for key, (axes, _) in copies.items() if axis in axes]
        if not keys:
            return
        comm = self.mesh.comm(axis)
        hashes = self.gathered(comm, [copies[key][1] for key in keys])
        differ = (hashes != hashes[0]).any(0) if comm.rank == 0 else []
        for index in np.flatnonzero(differ):
            yield self._finding(keys[index], number, axis, comm.members, hashes[:, index].tolist())

    def _tied_copies(
        self, number: int, copies: Mapping[tuple[str, str], tuple[set[str], int]]
    ) -> Iterator[GuardFinding]:
        """Yield findings for tied embeddings that differ between two pipeline stages."""
        comm = self.mesh.comm("p")
        pair = [item for item in self.trainer.parameters if item.tied_peer is not None]
        mine = [copies[item.name, "value"][1] for item in pair] or [0]
        hashes = self.gathered(comm, mine)[:, 0].tolist()
        for item in pair:
            here, there = hashes[comm.rank], hashes[item.tied_peer]
            if here != there and comm.rank < item.tied_peer:
                members = comm.members[comm.rank], comm.members[item.tied_peer]
                yield self._finding((item.name, "value"), number, "p", members, [here, there])

    def gathered(self, comm: Communicator, hashes: Sequence[int]) -> np.ndarray:
        """Gather the hashes of all ranks of `comm` into a NumPy array with one row per rank."""
        mine = self.mesh.pool.bring(np.array([hashes], np.uint64))
        return to_host(comm.all_gather(mine).wait())

    def _finding(
        self,
        key: tuple[str, str],
        number: int,
        axis: str,
        members: Sequence[int],
        hashes: Sequence[int],
    ) -> GuardFinding:
        """Return the finding that names the members whose hash differs from the majority."""
        (common, votes), *_ = Counter(hashes).most_common(1)
        ranks = " ".join(map(str, members))
        odd = [member for member, each in zip(members, hashes, strict=True) if each != common]
        who = (
            f"rank {' '.join(map(str, odd))}" if 2 * votes > len(hashes) else "one of these ranks"
        )
        name, kind = key
        thing = "parameter" if kind == "value" else f"optimizer state {kind} of"
        what = f"{thing} {name}: the copies of ranks {ranks} along {axis} differ"
        return GuardFinding(0, f"{who}: step {number}, {what}")


_FACTORS = 1 << 18  # number of integers hashed at once; their 64-bit factors use 2 MiB
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, rounded to an odd number


def odd_numbers(count: int) -> np.ndarray:
    """Return `count` random odd 64-bit numbers, identical on all ranks."""
    return np.random.default_rng(0).integers(0, 1 << 63, count, np.uint64) * 2 + 1


def hash_of(block: Array, factors: np.ndarray) -> int:
    """Return a 64-bit hash of a block, computed on its device.

    Any single bit flip changes the hash. The block is read as integers of at most 32 bits. Each
    integer is multiplied by an odd number, and the products are added modulo 2^64 (multilinear,
    arXiv:1202.4961).
    """
    words, total = block.reshape(-1).view(f"u{min(4, block.itemsize)}"), 0
    for start in range(0, words.size, factors.size):
        part = words[start : start + factors.size]
        total = (total * _GOLDEN + int((part * factors[: part.size]).sum())) % (1 << 64)
    return total


class LossSpikes:
    """Detector of loss spikes.

    A loss is a spike if it exceeds the mean of the last WINDOW losses by more than `limit`
    standard deviations. If `limit` is 0, no spikes are reported. The first LEAST losses are never
    spikes.
    """

    WINDOW, LEAST = 50, 10

    def __init__(self, limit: float) -> None:
        self.limit, self.count, self.seen = limit, 0, deque(maxlen=self.WINDOW)

    def see(self, loss: float) -> str | None:
        """Record the loss of the next step; return a message if it is a spike, else `None`."""
        before = [*self.seen]
        self.seen.append(loss)
        if not self.limit or len(before) < self.LEAST:
            return None
        mean, deviation = float(np.mean(before)), float(np.std(before))
        if loss <= mean + self.limit * deviation:
            return None
        self.count += 1
        return (
            f"loss spike {self.count}: {loss:.4f} after a mean of {mean:.4f} (sd {deviation:.4f})"
        )
