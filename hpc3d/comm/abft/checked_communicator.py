"""Communicator that records checksums of all blocks and compares them with those of its peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hpc3d.comm.abft.checksum import largest, norm, quiet, slack, terms, words
from hpc3d.comm.communicator import Communicator, Pending
from hpc3d.comm.mesh import MeshRecorder, along

_ROWS = 64  # initial number of rows in the table of checksums


class CallRecord(NamedTuple):
    """Record of a call: operation, number of elements, dtype, and location in the program."""

    op: str
    size: int
    dtype: np.dtype
    step: int
    layer: int
    phase: str

    def __str__(self) -> str:
        return f"{position(self)}: {self.op} of {self.size} elements of {self.dtype}"


def position(where: MeshRecorder | CallRecord) -> str:
    """Format the step, layer and phase of a call as text."""
    layer = f"layer {where.layer}, " if where.layer >= 0 else ""
    return f"step {where.step}, {layer}{where.phase}"


class CheckedCommunicator(Communicator):
    """Communicator that records checksums of the data in its calls while `ledger` is active.

    `ledger` is the rank's AbftChecker. Each row of `rows` describes a call: the checksums of the
    blocks sent to each member, then the checksums of the blocks received from each member. In a
    reduction, checksums are sums of the elements, each multiplied by a random sign. A reduction
    has a single received checksum, that of the result. The next entry is the norm of C s, where C
    is this rank's block and s is a vector of random signs.
    """

    def __init__(self, comm: Communicator, ledger: Any, axis: str) -> None:
        super().__init__(comm.rank, comm.size, comm.members, comm.pool)
        self.comm, self.ledger, self.axis = comm, ledger, axis
        # Calls to `buffer` and `grouped` transfer no data and are not recorded.
        self.buffer = comm.buffer  # type: ignore[method-assign]
        self.grouped = comm.grouped  # type: ignore[method-assign]
        self.rows = np.zeros((_ROWS, 2 * self.size), np.uint64)
        self.notes: list[CallRecord] = []
        self.came = np.zeros((_ROWS, self.size), bool)
        self.sums: dict[int, tuple[float, float]] = {}
        self.maxima: list[int] = []
        self.posted: Counter[int] = Counter()
        self.awaited: Counter[int] = Counter()
        self.sent: dict[tuple[int, int], tuple[int, None]] = {}
        self.arrived: dict[tuple[int, int], tuple[int, CallRecord]] = {}

    def _all_gather(self, block):
        pending = self.comm._all_gather(block)
        return self._moving("all_gather", block, pending, 1, [*range(self.size)])

    def _broadcast(self, block, root):
        return self._moving("broadcast", block, self.comm._broadcast(block, root), 1, [root])

    def _all_to_all(self, block):
        pending = self.comm._all_to_all(block)
        return self._moving("all_to_all", block, pending, self.size, [*range(self.size)])

    def _reduce_scatter(self, block):
        pending = self.comm._reduce_scatter(block)
        return self.adding("reduce_scatter", block, pending, self.size)

    def _reduce(self, block, root):
        return self.adding("reduce", block, self.comm._reduce(block, root), 1, self.rank == root)

    def _all_reduce(self, block, op):
        pending = self.comm._all_reduce(block, op)
        if op == "sum":
            return self.adding("all_reduce", block, pending, 1)
        if not self.ledger.active:
            return pending
        row = self.open("all_reduce", block)
        self.maxima.append(row)

        def check(total):
            self.rows[row, self.size] = words(total)[0]
            return total

        return pending.then(check)

    def open(self, op: str, block: np.ndarray) -> int:
        """Append a row for a communication call to the checksum table; return its index."""
        return self._append(self.note(op, block))

    def _append(self, note: CallRecord) -> int:
        if len(self.notes) == len(self.rows):
            self.rows, self.came = (
                np.concatenate([table, np.zeros_like(table)]) for table in (self.rows, self.came)
            )
        self.notes.append(note)
        return len(self.notes) - 1

    def in_flight(self, row: int) -> Callable[[], int]:
        """Return a function that returns the row of a call when the call ends.

        If the records have been compared since the call was posted, the call gets a new row.
        """
        notes, note, posted = self.notes, self.notes[row], self.rows[row].copy()

        def at_end():
            if self.notes is notes:
                return row
            new = self._append(note)
            self.rows[new] = posted
            return new

        return at_end

    def note(self, op: str, block: np.ndarray) -> CallRecord:
        trace = self.ledger.trace
        return CallRecord(op, block.size, block.dtype, trace.step, trace.layer, trace.phase)

    def _moving(
        self, op: str, block: np.ndarray, pending: Pending, parts: int, givers: list[int]
    ) -> Pending:
        """Record a call that sends `parts` chunks and receives a chunk from each of `givers`."""
        if not self.ledger.active:
            return pending
        row = self.open(op, block)
        self.rows[row, : self.size] = words(block, parts)
        row_at_end = self.in_flight(row)

        def check(whole):
            row = row_at_end()
            at = self.watched(whole, givers)
            parts = whole.reshape(len(givers), -1)
            for giver in at:
                self.rows[row, self.size + giver] = words(parts[givers.index(giver)])[0]
            self.came[row, at] = True
            return whole

        return pending.then(check)

    def watched(self, whole: np.ndarray, givers: list[int]) -> list[int]:
        """Return the senders, a subset of `givers`, whose chunks this member checks.

        If several members read the same shared memory, each of them checks different chunks.
        """
        if whole.flags.writeable:
            return givers
        number, readers = self.comm.readers
        return givers[(number + 1) % min(readers, len(givers)) :: readers]

    def adding(
        self, op: str, block: np.ndarray, pending: Pending, parts: int, gets: bool = True
    ) -> Pending:
        """Record a reduction of `parts` chunks.

        `gets` is True if this member receives a result.
        """
        if not self.ledger.active:
            return pending
        row, signs = self.open(op, block), self.ledger.signs
        numbers, sums = self.rows[row].view(np.float64), self.ledger.rows(block, parts)
        numbers[: self.size] = signs.total(sums)
        numbers[self.size + 1] = norm(sums)
        share = slack(block.dtype, terms(block), self.size)
        row_at_end = self.in_flight(row)

        def check(total):
            row = row_at_end()
            if gets:
                self.sums[row] = share, norm(total)
                self.rows[row].view(np.float64)[self.size] = signs.total(signs.rows(total))[0]
            return total

        return pending.then(check)

    def _send(self, block, peer):
        key = peer, self.posted[peer]
        self.posted[peer] += 1
        if self.ledger.active:
            self.sent[key] = words(block)[0], None
        return self.comm._send(block, peer)

    def _recv(self, shape, dtype, peer):
        key = peer, self.awaited[peer]
        self.awaited[peer] += 1
        pending = self.comm._recv(shape, dtype, peer)
        if not self.ledger.active:
            return pending

        def check(block):
            self.arrived[key] = words(block)[0], self.note("recv", block)
            return block

        return pending.then(check)

    @quiet  # also covers `moves`, `totals` and `peaks`, which run inside this method
    def compare(self) -> list[str]:
        """Compare all members' records; return one line per error in this rank's results."""
        count = len(self.notes)
        mine = np.zeros((1, count + 1, 2 * self.size), np.uint64)
        mine[0, :count] = self.rows[:count]
        mine[0, count, 0] = max(len(self.sent), len(self.arrived))
        everyone = self.all_gather(mine).wait()
        found = [*self.moves(everyone), *self.totals(everyone), *self.peaks(everyone)]
        messages = int(everyone[:, count, 0].max())
        found += self.messages(messages) if messages else []
        self.rows[:count], self.came[:count] = 0, False
        self.notes, self.sums, self.maxima = [], {}, []
        return found

    def moves(self, everyone: np.ndarray) -> Iterator[str]:
        """Yield an error line for each received block that differs from the sent block."""
        count = len(self.notes)
        given = everyone[:, :count, self.rank].T
        wrong = self.came[:count] & (given != self.rows[:count, self.size :])
        for row, giver in np.argwhere(wrong).tolist():
            yield self.line(
                self.notes[row],
                f"the data from rank {self.members[giver]} differ from its contribution",
            )

    def totals(self, everyone: np.ndarray) -> Iterator[str]:
        """Yield an error line for each wrong sum on this rank; skip sums that may overflow."""
        for row, (share, size) in self.sums.items():
            given, note = everyone[:, row].view(np.float64), self.notes[row]
            off = abs(given[self.rank, self.size] - given[:, self.rank].sum())
            norms = given[:, self.size + 1].sum()
            limit = share * (norms + (size if size < np.inf else 0.0))
            if norms < largest(note.dtype) and not off <= limit:
                what = f"the sum is off by {off:.3g}, but rounding errors are at most {limit:.3g}"
                yield self.line(note, what)

    def peaks(self, everyone: np.ndarray) -> Iterator[str]:
        """Yield an error line for each maximum on which this rank disagrees with the majority."""
        for row in self.maxima:
            got = everyone[:, row, self.size].tolist()
            if 2 * got.count(got[self.rank]) <= len(got) and len(set(got)) > 1:
                yield self.line(
                    self.notes[row], "the maximum differs from the result on the other ranks"
                )

    def messages(self, count: int) -> Iterator[str]:
        """Yield an error line for each message whose received bits differ from the sent bits.

        Messages that the peer has not recorded yet are checked in the next comparison.
        """
        table = np.zeros((count, 6), np.uint64)
        for column, notes in ((0, self.sent), (3, self.arrived)):
            for row, ((peer, number), (bits, _)) in enumerate(notes.items()):
                table[row, column : column + 3] = peer + 1, number, bits
        everyone = enumerate(self.all_gather(table[None]).wait().tolist())
        rows, mine = [(peer, *row) for peer, rows in everyone for row in rows], self.rank + 1
        sent = {(peer, number): bits for peer, to, number, bits, *_ in rows if to == mine}
        seen = {(peer, number) for peer, _, _, _, giver, number, _ in rows if giver == mine}
        for key in [*self.arrived]:
            if key in sent:
                bits, note = self.arrived.pop(key)
                if bits != sent[key]:
                    giver = self.members[key[0]]
                    yield self.line(note, f"the data from rank {giver} differ from the data sent")
        self.sent = {key: letter for key, letter in self.sent.items() if key not in seen}

    def forget(self) -> None:
        """Discard records of messages that only the sender or only the receiver has recorded."""
        self.sent, self.arrived = {}, {}

    def line(self, note: CallRecord, what: str) -> str:
        return f"rank {self.members[self.rank]}: {note} {along(self.axis)}: {what}"
