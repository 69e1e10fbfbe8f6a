"""Algorithm-based fault tolerance for the matrix products and messages of a training step.

Matrix products are checked immediately. Checksums of communication calls are recorded during the
step and compared before the update. The checks are:

    matrix product                 C s = A (B s) up to rounding (hpc3d.comm.abft.checksum)
    all_gather, broadcast,         checksum of the bits that a member sent = checksum of the bits
    all_to_all, send and recv      that were received from it, exactly
    reduce_scatter, all_reduce,    the signed sums of all members' contributions to a chunk add up
    reduce                         to the signed sum of the result, up to rounding
    all_reduce of the maximum      all members receive the same bits

When the gradients of a step are complete, the members of each axis exchange their records in one
all-gather, with one row per call. Later calls, such as ZeRO's all-gather of the parameters after
the update, are compared in the next checked step. Elementwise operations, and matrix products
inside attention, are not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from hpc3d.comm.abft.checked_communicator import CheckedCommunicator, position
from hpc3d.comm.abft.checksum import WIDE, Signs, quiet, wrong_row
from hpc3d.comm.communicator import Communicator
from hpc3d.comm.mesh import MeshRecorder, NullRecorder


class AbftChecker:
    """Checker that records and compares the checksums of one rank in every `every`-th step.

    `found` lists the error messages of this rank.
    """

    def __init__(self, rank: int, every: int = 1) -> None:
        self.rank, self.every = rank, every
        self.comms: list[CheckedCommunicator] = []
        self.found: list[str] = []
        self.signs, self.active = Signs(), False
        self.trace: MeshRecorder = NullRecorder()
        # Result of the latest matrix product (a weak reference), and its signed row sums.
        self.latest: tuple[Callable[[], Any], Any] = (lambda: None, None)

    def wrap(self, comm: Communicator, axis: str) -> CheckedCommunicator:
        """Return a wrapper around `comm` that records every call."""
        self.comms.append(CheckedCommunicator(comm, self, axis))
        return self.comms[-1]

    def begin(self, number: int, trace: MeshRecorder) -> None:
        """Begin training step `number`; `trace` provides the current layer and phase."""
        self.trace, self.active = trace, number % self.every == 0
        if self.every > 1:
            for comm in self.comms:
                comm.forget()

    def end(self) -> None:
        """End the step; calls between steps are not recorded."""
        self.active = False

    @quiet
    def product(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        """Check that C = A B; for arrays [rows, experts, columns], check each expert's product."""
        if not self.active or not c.size:
            return
        if c.ndim == 2:
            sums = self._sums(a, b, c)
        else:
            stacks = zip(*(block.swapaxes(0, 1) for block in (a, b, c)), strict=True)
            each = [self._sums(a, b, c, f", expert {n}") for n, (a, b, c) in enumerate(stacks)]
            sums = np.stack(each, 1)
        # `Signs.rows` splits a row of more than WIDE elements into several sums, but `sums` has
        # one sum per row, so `rows` cannot reuse it then.
        if c.shape[-1] <= WIDE:
            self.latest = weakref.ref(c), sums

    def _sums(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, which: str = "") -> np.ndarray:
        """Check that C = A B up to rounding; return the signed row sums of C."""
        signs = self.signs(c.shape[1], c.dtype)
        sums, difference = c @ signs, a @ (b @ signs)
        difference -= sums
        row = wrong_row(a, b, sums, np.abs(difference, out=difference))
        if row is not None:
            again = a[row] @ b
            off = np.nan_to_num(np.abs(again - c[row]), nan=np.inf)
            column = int(off.argmax())
            shape = f"[{a.shape[0]}, {a.shape[1]}] [{b.shape[0]}, {b.shape[1]}]{which}"
            self.found.append(
                f"rank {self.rank}: {position(self.trace)}: product {shape}: row {row}, "
                f"column {column} is {c[row, column]:.6g}, but should be {again[column]:.6g}"
            )
        return sums

    def rows(self, block: np.ndarray, parts: int = 1) -> np.ndarray:
        """Return the signed row sums of a block; reuse sums already computed by `product`."""
        product, sums = self.latest
        return sums.reshape(parts, -1) if product() is block else self.signs.rows(block, parts)

    def compare(self) -> int:
        """Compare checksums with the other ranks on each axis; return this rank's error count.

        The call is collective: all ranks make it at the same point of a step.
        """
        if self.active:
            self.active = False  # the exchange of checksums is not itself recorded
            for comm in self.comms:
                self.found += comm.compare()
            self.active = True
        return len(self.found)
