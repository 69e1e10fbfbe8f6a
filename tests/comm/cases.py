"""Test cases for any communicator; each case compares all blocks with NumPy.

Every rank draws the operands of all members. They are integers, so results are exact in all types.
"""

import re

import ml_dtypes
import numpy as np

NARROW = ("float16", "bfloat16")
DTYPES = ("float64", "float32", "int32", *NARROW)
LARGE = (7, 1201)  # above 16 KiB in every type, and an odd number of elements
LONG = (7, 20011)  # 64 KiB and more for each of 5 members, which do not divide it


def blocks(comm, shape, dtype, seed=0):
    """Return the blocks of all members, in order."""
    generator, most = np.random.default_rng(seed), 9 if dtype == "bfloat16" else 99
    return [generator.integers(-most, most, shape).astype(dtype) for _ in range(comm.size)]


def same(ours, expected):
    assert ours.dtype == expected.dtype
    np.testing.assert_array_equal(ours, expected)


def all_gather(comm, dtype):
    for shape in ((3, 5), (2, 4, 6), (1, 1), (0, 5)):
        for dim in (0, 1):
            parts = blocks(comm, shape, dtype)
            ours = comm.all_gather(parts[comm.rank], dim).wait()
            same(ours, np.concatenate(parts, dim))


def reduce_scatter(comm, dtype):
    for shape in ((5 * comm.size, 3 * comm.size), (comm.size, 2 * comm.size, 4)):
        for dim in (0, 1):
            partial = blocks(comm, shape, dtype)
            total = np.sum(partial, 0, dtype)
            ours = comm.reduce_scatter(partial[comm.rank], dim).wait()
            same(ours, np.split(total, comm.size, dim)[comm.rank])


def all_reduce(comm, dtype):
    for shape in ((1,), (3, 5), LARGE):
        partial = blocks(comm, shape, dtype)
        same(comm.all_reduce(partial[comm.rank]).wait(), np.sum(partial, 0, dtype))
        same(comm.all_reduce(partial[comm.rank], "max").wait(), np.max(partial, 0))


def broadcast(comm, dtype):
    """Members other than the owner pass zero rows and do not know the number of rows."""
    for root in range(comm.size):
        for shape in ((root + 2, 3), LARGE, (0, 3)):
            whole = blocks(comm, shape, dtype)[root]
            mine = whole if comm.rank == root else whole[:0]
            same(comm.broadcast(mine, root).wait(), whole)


def reduce(comm, dtype):
    for root in range(comm.size):
        for shape in ((4, 3), LARGE):
            partial = blocks(comm, shape, dtype)
            total = np.sum(partial, 0, dtype)
            mine = total if comm.rank == root else total[:0]
            same(comm.reduce(partial[comm.rank], root).wait(), mine)


def all_to_all(comm, dtype):
    """Exchange rows, and slots of experts [e R, E/e, h]."""
    for shape in ((2 * comm.size, 3), (3 * comm.size, 2, 5)):
        sent = blocks(comm, shape, dtype)
        parts = [np.split(block, comm.size)[comm.rank] for block in sent]
        same(comm.all_to_all(sent[comm.rank]).wait(), np.concatenate(parts))


def send_and_recv(comm, dtype):
    """Two messages to the next member arrive in the order in which they were sent."""
    if comm.size == 1:
        return
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    first, second = (blocks(comm, (3, 4), dtype, seed) for seed in (0, 1))
    with comm.grouped():
        sent = [comm.send(block[comm.rank], after) for block in (first, second)]
        received = [comm.recv((3, 4), np.dtype(dtype), before) for _ in range(2)]
    same(received[0].wait(), first[before])
    same(received[1].wait(), second[before])
    for pending in sent:
        pending.wait()


def strided(comm, dtype):
    """A block need not be contiguous."""
    parts = blocks(comm, (4, 2 * comm.size), dtype)
    mine = parts[comm.rank].T
    total = np.sum(parts, 0, dtype).T
    same(comm.all_gather(mine).wait(), np.concatenate([part.T for part in parts]))
    same(comm.reduce_scatter(mine).wait(), np.split(total, comm.size)[comm.rank])
    same(comm.all_reduce(mine[:, ::2]).wait(), total[:, ::2])


def in_place(comm, dtype):
    """A block in the communicator's own buffer, or a result of a call, gives the same result."""
    parts = blocks(comm, (3 * comm.size, 5), dtype)
    total = np.sum(parts, 0, dtype)
    buffer = comm.buffer((3 * comm.size, 5), dtype)
    buffer[...] = parts[comm.rank]
    mine = comm.reduce_scatter(buffer).wait()
    del buffer
    same(mine, np.split(total, comm.size)[comm.rank])
    whole = comm.all_gather(mine).wait()
    same(whole, total)
    same(comm.all_reduce(whole).wait(), total * np.asarray(comm.size, dtype))


def in_flight(comm, dtype):
    """Calls that are posted together may be waited for in any order that all members share."""
    parts = blocks(comm, (comm.size, 3), dtype)
    large = blocks(comm, LARGE, dtype)
    root = comm.size - 1
    mine = parts[comm.rank]
    gathered = comm.all_gather(mine)
    scattered = comm.reduce_scatter(mine)
    spread = comm.broadcast(mine if comm.rank == root else mine[:0], root)
    collected = comm.reduce(mine, 0)
    again = comm.all_gather(large[comm.rank])
    total = np.sum(parts, 0, dtype)
    same(again.wait(), np.concatenate(large))
    same(collected.wait(), total if comm.rank == 0 else total[:0])
    same(scattered.wait(), np.split(total, comm.size)[comm.rank])
    same(spread.wait(), parts[root])
    same(gathered.wait(), np.concatenate(parts))


def long_blocks(comm, dtype):
    """Several calls with long blocks are in flight at once."""
    parts = blocks(comm, LONG, dtype)
    tall = blocks(comm, (3 * comm.size, 6007), dtype, seed=1)
    mine, root = parts[comm.rank], comm.size - 1
    total = np.sum(parts, 0, dtype)
    summed, highest = comm.all_reduce(mine), comm.all_reduce(mine, "max")
    gathered, scattered = comm.all_gather(mine), comm.reduce_scatter(tall[comm.rank])
    spread = comm.broadcast(mine if comm.rank == root else mine[:0], root)
    collected = comm.reduce(mine, root)
    same(scattered.wait(), np.split(np.sum(tall, 0, dtype), comm.size)[comm.rank])
    same(highest.wait(), np.max(parts, 0))
    same(summed.wait(), total)
    same(collected.wait(), total if comm.rank == root else total[:0])
    same(spread.wait(), parts[root])
    same(gathered.wait(), np.concatenate(parts))


def adjoint(comm, dtype):
    """<A x, y> = <x, A' y> over all members, for both pairs of adjoint operations. The inner
    products exceed 16-bit types."""
    if dtype in NARROW:
        return
    x, y = (blocks(comm, (3, 4), dtype, 0), blocks(comm, (3 * comm.size, 4), dtype, 1))
    whole = comm.all_gather(x[comm.rank]).wait()
    part = comm.reduce_scatter(y[comm.rank]).wait()
    balanced(comm, np.vdot(whole, y[comm.rank]), np.vdot(x[comm.rank], part))
    for root in range(comm.size):
        mine = x[root] if comm.rank == root else x[root][:0]
        spread = comm.broadcast(mine, root).wait()
        collected = comm.reduce(x[comm.rank], root).wait()
        balanced(comm, np.vdot(spread, x[comm.rank]), np.vdot(mine, collected))


def balanced(comm, left, right):
    """Return True if two numbers per member have the same sums over all members."""
    pairs = comm.all_gather(np.array([[left, right]])).wait()
    assert pairs[:, 0].sum() == pairs[:, 1].sum() != 0


def refusal(comm, dtype):
    """Rows that are not divisible are rejected on all members before anything is sent."""
    if comm.size == 1:
        return
    try:
        comm.reduce_scatter(np.zeros((comm.size + 1, 2), dtype))
    except ValueError as error:
        assert re.fullmatch(f".* has size {comm.size + 1}, .* ranks, {comm.size}", str(error))
    else:
        raise AssertionError("accepted")


CASES = (
    all_gather,
    reduce_scatter,
    all_reduce,
    broadcast,
    reduce,
    all_to_all,
    send_and_recv,
    strided,
    in_place,
    in_flight,
    long_blocks,
    adjoint,
    refusal,
)


def rounded_once(comm, dtype):
    """16-bit sums equal float32 sums in the order of the members, bit for bit, rounded once. If
    hosts have several members, they are rounded twice."""
    room = 2 * float(ml_dtypes.finfo(dtype).eps) if hasattr(comm, "wire") else 0.0

    def check(ours, expected):
        assert ours.dtype == expected.dtype
        np.testing.assert_allclose(ours.astype("f4"), expected.astype("f4"), rtol=room)

    for shape in ((comm.size, 3), (3 * comm.size, 1201), (5 * comm.size, 20011)):
        draws = [
            np.random.default_rng(seed).random(shape, np.float32) for seed in range(comm.size)
        ]
        parts = [draw.astype(dtype) for draw in draws]
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total += part
        total, mine = total.astype(dtype), parts[comm.rank]
        check(comm.all_reduce(mine).wait(), total)
        check(comm.reduce_scatter(mine).wait(), np.split(total, comm.size)[comm.rank])
        check(comm.reduce(mine, 0).wait(), total if comm.rank == 0 else total[:0])


def every(comm):
    """Run all cases with all types."""
    for case in CASES:
        for dtype in DTYPES:
            case(comm, dtype)
    for dtype in NARROW if comm.size > 1 else ():
        rounded_once(comm, dtype)
