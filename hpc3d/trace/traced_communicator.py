"""Communicator that records its calls as trace events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.communicator import Communicator, Pending, received_bytes
from hpc3d.trace.schema import CATEGORY, DTYPE, MESSAGES, OP

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.arrays.array import Array

COMM, COPY = map(CATEGORY.index, ("comm", "copy"))
# A call and its wait are recorded as one row if at most this time (in ns) elapses between them.
AT_ONCE = 20_000
OP_NUMBER = {name: number for number, name in enumerate(OP)}


class Traced:
    """Communicator that records the group, sequence number, bytes and time of its calls.

    Each call has a row that spans the wait for its result. If the wait immediately follows the
    call, this row begins when the call is posted. Otherwise, a separate row of category copy,
    without sequence number and bytes, records the posting of the call, and the rank may compute
    between the two rows. Collectives are numbered within their group. Messages are numbered
    separately for each pair of sender and receiver, so (group, sender, receiver, number)
    identifies the two rows of a message.
    """

    def __init__(self, comm: Communicator, recorder: Any, group: int) -> None:
        self.comm, self.recorder, self.group = comm, recorder, group
        self.rank, self.size = comm.rank, comm.size
        self.members, self.pool = comm.members, comm.pool
        self.buffer, self.grouped, self.sequence = comm.buffer, comm.grouped, Counter[Hashable]()

    def all_gather(self, block: Array, dim: int = 0) -> Pending:
        return self.call("all_gather", block, -1, partial(self.comm.all_gather, block, dim))

    def reduce_scatter(self, block: Array, dim: int = 0) -> Pending:
        post = partial(self.comm.reduce_scatter, block, dim)
        return self.call("reduce_scatter", block, -1, post)

    def all_reduce(self, block: Array, op: str = "sum") -> Pending:
        return self.call("all_reduce", block, -1, partial(self.comm.all_reduce, block, op))

    def broadcast(self, block: Array, root: int) -> Pending:
        return self.call("broadcast", block, root, partial(self.comm.broadcast, block, root))

    def reduce(self, block: Array, root: int) -> Pending:
        return self.call("reduce", block, root, partial(self.comm.reduce, block, root))

    def all_to_all(self, block: Array) -> Pending:
        return self.call("all_to_all", block, -1, partial(self.comm.all_to_all, block))

    def send(self, block: Array, peer: int) -> Pending:
        return self.call("send", block, peer, partial(self.comm.send, block, peer))

    def recv(self, shape: Sequence[int], dtype: DTypeLike, peer: int) -> Pending:
        block = np.empty((0, *shape[1:]), dtype)
        return self.call("recv", block, peer, partial(self.comm.recv, shape, dtype, peer))

    def number(self, op: str, peer: int) -> int:
        """Return the next sequence number, per group (collectives) or op and peer (messages)."""
        key = (op, peer) if op in MESSAGES else "collective"
        self.sequence[key] += 1
        return self.sequence[key] - 1

    def call(self, op: str, block: Array, peer: int, post: Callable[[], Pending]) -> Pending:
        """Post a call with `post()`, and return a handle whose `wait` also records the call."""
        recorder, seq = self.recorder, self.number(op, peer)
        context, step = recorder.context, recorder.step
        posted = recorder.clock()
        pending = post()
        free = recorder.latest = recorder.clock()
        data = block.nbytes, block.size, block.dtype  # so that `finish` does not keep the block

        def finish():
            begin = recorder.clock()
            result = pending.wait()
            end = recorder.clock()
            name, number = recorder.name(op), OP_NUMBER[op]
            if recorder.latest > free or begin - free > AT_ONCE:
                where = context, self.group
                recorder.put(posted, free - posted, name, COPY, number, *where, step=step)
                recorder.blocked += free - posted
            else:
                begin = posted
            recorder.blocked += end - begin
            about = self.about(op, seq, peer, data, result) | {"posted": posted}
            recorder.put(begin, end - begin, name, COMM, number, context, **about)
            return result

        return Pending(finish)

    def about(
        self, op: str, seq: int, peer: int, data: tuple[int, int, Any], result: Any
    ) -> dict[str, int]:
        """Return the columns of a call's row that describe its group, peer and data.

        `data` is a tuple of the number of bytes, the number of elements and the dtype of the
        input block.
        """
        nbytes, count, dtype = data
        nbytes = result.nbytes if op in ("broadcast", "recv") else nbytes
        return {
            "group": self.group,
            "seq": seq,
            "peer": -1 if peer < 0 else self.members[peer],
            "received": received_bytes(op, nbytes, self.size, self.rank, peer),
            "count": count,
            "dtype": _dtype_number(dtype),
        }


@cache
def _dtype_number(dtype: np.dtype) -> int:
    """Return the code of a dtype in the trace schema; unknown dtypes have the code of "none"."""
    return DTYPE.index(dtype.name) if dtype.name in DTYPE else 0
