"""Checksums of products and messages detect and locate every significant bit flip."""

import numpy as np
import pytest

from hpc3d.comm.abft.checked_communicator import CheckedCommunicator
from hpc3d.comm.abft.checker import AbftChecker
from hpc3d.comm.communicator import Communicator
from hpc3d.comm.mesh import NullRecorder
from hpc3d.comm.threads import run

SIZE, FAULTY = 3, 1  # members along x, and the one that the fault is on
TOP = {"float32": 30, "float64": 62}  # the highest bit of the exponent


def flip(block, bit, place=0):
    """Return a copy of a block with one bit of one element flipped."""
    block = np.array(block)
    flat = block.reshape(-1)
    flat.view(f"u{flat.itemsize}")[place % flat.size] ^= np.array(1 << bit, f"u{flat.itemsize}")
    return block


class Faulty(Communicator):
    """Communicator that flips a bit in results of `op` on this member."""

    def __init__(self, comm, op, bit):
        super().__init__(comm.rank, comm.size, comm.members, comm.pool)
        self.comm, self.op, self.bit = comm, op, bit
        for hook in (
            "_all_gather",
            "_reduce_scatter",
            "_all_reduce",
            "_broadcast",
            "_reduce",
            "_all_to_all",
        ):
            setattr(self, hook, self.flipping(hook))
        self._send, self._recv = comm._send, self.flipping("_recv")

    def flipping(self, hook):
        def call(*arguments):
            pending = getattr(self.comm, hook)(*arguments)
            hit = hook == self.op  # when it is called: what is exchanged at the end is right
            return pending.then(lambda block: self.hurt(block) if hit else block)

        return call

    def hurt(self, block):
        return flip(block, self.bit, block.size // 2) if block.size else block


def drawn(comm, shape, dtype="float32"):
    return np.random.default_rng(comm.rank).standard_normal(shape).astype(dtype)


def swap(comm, block):
    """Send a message to the next member, and receive one from the previous member."""
    sent = comm.send(block, (comm.rank + 1) % comm.size)
    comm.recv(block.shape, block.dtype, (comm.rank - 1) % comm.size).wait()
    sent.wait()


CALLS = {
    "_all_gather": lambda comm, block: comm.all_gather(block).wait(),
    "_reduce_scatter": lambda comm, block: comm.reduce_scatter(block).wait(),
    "_all_reduce": lambda comm, block: comm.all_reduce(block).wait(),
    "_broadcast": lambda comm, block: comm.broadcast(
        block[: len(block) * (comm.rank == 0)], 0
    ).wait(),
    "_reduce": lambda comm, block: comm.reduce(block, FAULTY).wait(),
    "_all_to_all": lambda comm, block: comm.all_to_all(block).wait(),
    "_recv": swap,
}
NAMES = {
    "_all_gather": "all_gather",
    "_reduce_scatter": "reduce_scatter",
    "_all_reduce": "all_reduce",
    "_broadcast": "broadcast",
    "_reduce": "reduce",
    "_all_to_all": "all_to_all",
    "_recv": "recv",
}
EXACT = ("_all_gather", "_broadcast", "_all_to_all", "_recv")


def found(op, bit, work, dtype="float32"):
    """Return the findings of each member if a bit flips in a result of `op` on the faulty one."""

    def rank(mesh):
        comm, ledger, trace = mesh.comm("x"), AbftChecker(mesh.rank), NullRecorder()
        comm = Faulty(comm, op, bit) if mesh.rank == FAULTY and bit is not None else comm
        checked = ledger.wrap(comm, "x")
        trace.layer, trace.phase, trace.step = 2, "backward", 7
        ledger.begin(7, trace)
        work(checked, drawn(checked, (6, 5), dtype))
        comm.op = None
        ledger.compare()
        return ledger.found

    return run({"x": SIZE}, rank)


@pytest.mark.parametrize("dtype", TOP)
@pytest.mark.parametrize("op", CALLS)
def test_bit_flip_is_detected_on_the_rank_where_it_happened(op, dtype):
    sign = TOP[dtype] + 1
    mantissa = {"float32": 23, "float64": 52}[dtype]
    bits = [sign, TOP[dtype], mantissa, mantissa - 5, *([0] if op in EXACT else [])]
    for bit in bits:
        lines = found(op, bit, CALLS[op], dtype)
        assert [len(here) for here in lines] == [0, 1, 0], (bit, lines)
        (line,) = lines[FAULTY]
        assert line.startswith(f"rank {FAULTY}: step 7, layer 2, backward: {NAMES[op]} of ")
        assert "along x" in line


@pytest.mark.parametrize(
    ("op", "giver"), [("_all_gather", 1), ("_broadcast", 0), ("_all_to_all", 1), ("_recv", 0)]
)
def test_checksum_error_names_the_sending_rank(op, giver):
    (line,) = found(op, 3, CALLS[op])[FAULTY]
    assert f" rank {giver} " in line.rpartition(":")[2]


def test_differing_all_reduce_maximum_is_attributed_to_the_minority():
    lines = found("_all_reduce", 3, lambda comm, block: comm.all_reduce(block, "max").wait())
    assert [len(here) for here in lines] == [0, 1, 0]
    assert "all_reduce of 30 " in lines[FAULTY][0]
    assert lines[FAULTY][0].rpartition(":")[2].count("maximum") == 1


def test_checker_handles_concurrent_calls_and_many_steps():
    def work(comm, block):
        for _ in range(40):  # more calls than a fresh table has rows
            first, second = comm.all_gather(block), comm.reduce_scatter(block)
            swap(comm, block)
            second.wait()
            first.wait()

    assert found("_recv", None, work) == [[], [], []]
    lines = found("_reduce_scatter", 30, work)
    assert [len(here) for here in lines] == [0, 40, 0]


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_call_that_ends_after_a_comparison_is_checked_in_the_next_one(op):
    def rank(mesh):
        comm, ledger = mesh.comm("x"), AbftChecker(mesh.rank)
        hurt = Faulty(comm, f"_{op}", 30) if mesh.rank == FAULTY else comm
        checked = ledger.wrap(hurt, "x")
        ledger.begin(0, NullRecorder())
        block = drawn(checked, (6, 5), "float32")
        late, hurt.op = getattr(checked, op)(block), None
        found = [ledger.compare()]
        checked.all_to_all(block).wait()
        late.wait()
        return [*found, ledger.compare()]

    assert run({"x": SIZE}, rank) == [[0, 0], [0, 1], [0, 0]]


def product(dtype="float32", m=96, k=48, n=64, seed=0):
    draw = np.random.default_rng(seed)
    a, b = draw.standard_normal((m, k)).astype(dtype), draw.standard_normal((k, n)).astype(dtype)
    return a, b, a @ b


def finds(a, b, c):
    """Return the findings of a ledger for a product."""
    ledger, trace = AbftChecker(4), NullRecorder()
    trace.step, trace.layer, trace.phase = 3, 1, "forward"
    ledger.begin(3, trace)
    ledger.product(a, b, c)
    return ledger.found


@pytest.mark.parametrize(("dtype", "least"), [("float32", 23 - 7), ("float64", 52 - 36)])
def test_bit_flip_in_a_product_is_detected(dtype, least):
    """Tests the sign, the exponent and the upper mantissa bits of average elements."""
    a, b, c = product(dtype)
    row, column = np.argwhere(np.abs(c) > np.abs(c).mean())[5]
    for bit in range(least, TOP[dtype] + 2):
        broken = flip(c, bit, row * c.shape[1] + column)
        (line,) = finds(a, b, broken)
        where = f"product [96, 48] [48, 64]: row {row}, column {column} is "
        assert line.startswith(f"rank 4: step 3, layer 1, forward: {where}"), bit
    assert not finds(a, b, c)


def test_bit_flip_in_a_batched_product_names_the_expert():
    pairs = [product(seed=seed)[:2] for seed in range(3)]
    a, b = (np.stack(each, 1) for each in zip(*pairs, strict=True))
    c = np.einsum("mek,ken->men", a, b)
    assert not finds(a, b, c)
    assert not finds(c, b.T, np.einsum("men,ken->mek", c, b))
    (line,) = finds(a, b, flip(c, 30, np.ravel_multi_index((17, 2, 5), c.shape)))
    assert "product [96, 48] [48, 64], expert 2: row 17, column 5 is " in line


@pytest.mark.parametrize("dtype", TOP)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_non_finite_element_in_a_product_is_detected(value, dtype):
    a, b, c = product(dtype)
    c[17, 5] = value
    (line,) = finds(a, b, c)
    assert f"row 17, column 5 is {value}" in line


def test_products_with_transposed_operands_are_checked():
    a, b, c = product()
    back = c @ b.T
    assert not finds(c, b.T, back)
    assert len(finds(c, b.T, flip(back, 28, 77))) == 1
    assert len(finds(a.T, c, flip(a.T @ c, 31, 7))) == 1


HARD = {
    "positive": lambda a, b: (np.abs(a), np.abs(b)),
    "of rank one": lambda a, b: (np.outer(a[:, 0], a[0]), b),
    "canceling": lambda a, b: (a + 100, b - b.mean(0)),
    "uneven": lambda a, b: (a**5, b**5),
    "rows of zeros": lambda a, b: (a * (np.arange(len(a))[:, None] % 7 == 0), b),
    "large": lambda a, b: (a * 1e18, b * 1e18),
    "small": lambda a, b: (a * 1e-22, b * 1e-22),
    "smaller": lambda a, b: (a * 1e-16, b * 1e-10),
    "not finite": lambda a, b: (np.where(a > 3, np.nan, a), np.where(b > 3, np.inf, b)),
}


@pytest.mark.parametrize("dtype", TOP)
@pytest.mark.parametrize("kind", HARD)
def test_rounding_of_products_is_not_reported(kind, dtype):
    sizes = ((64, 32, 48), (7, 1, 5), (5, 1500, 3), (33, 700, 65), (600, 16, 2), (1, 900, 1))
    for seed, size in enumerate(sizes):
        a, b, _ = product("float64", *size, seed)
        a, b = (x.astype(dtype) for x in HARD[kind](a, b))
        with np.errstate(invalid="ignore"):  # of the product, not of what is made of it
            c = a @ b
        assert not finds(a, b, c), size


def sums(blocks):
    """Return the findings of the members of an axis for a reduce-scatter of their blocks."""

    def rank(mesh):
        ledger = AbftChecker(mesh.rank)
        comm = ledger.wrap(mesh.comm("x"), "x")
        ledger.begin(0, NullRecorder())
        comm.reduce_scatter(blocks[mesh.rank]).wait()
        comm.all_reduce(blocks[mesh.rank].ravel()).wait()
        ledger.compare()
        return ledger.found

    return run({"x": len(blocks)}, rank)


@pytest.mark.parametrize("kind", HARD)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning:hpc3d.comm.communicator")
def test_rounding_of_reductions_is_not_reported(kind):
    """A non-finite sum is reported itself; results computed from it are not reported."""
    for seed in range(5):
        blocks = [HARD[kind](*product("float64", 90, 40, 60, 4 * seed + i)[:2]) for i in range(4)]
        parts = [(a[:88].astype("float32"), b.astype("float32")) for a, b in blocks]
        assert sums([a for a, _ in parts]) == [[]] * 4
        with np.errstate(invalid="ignore"):
            products = [a @ b for a, b in parts]
        assert sums(products) == [[]] * 4


@pytest.mark.parametrize("experts", [0, 2])
def test_row_sums_of_a_checked_product_are_reused(experts):
    a, b, c = product(m=6)
    if experts:
        a, b, c = (np.stack([block] * experts, 1) for block in (a, b, c))
    ledger = AbftChecker(0)
    ledger.begin(0, NullRecorder())
    ledger.product(a, b, c)
    np.testing.assert_allclose(ledger.rows(c, 2), ledger.signs.rows(c, 2), rtol=1e-5)
    assert ledger.rows(c, 2).base is ledger.latest[1]
    assert not np.array_equal(ledger.rows(c + 1, 2), ledger.rows(c, 2))


def test_product_with_long_rows_passes_the_reduce_scatter_check():
    def rank(mesh):
        ledger = AbftChecker(mesh.rank)
        comm = ledger.wrap(mesh.comm("x"), "x")
        ledger.begin(0, NullRecorder())
        a, b, c = product(m=4, k=8, n=5000, seed=mesh.rank)
        ledger.product(a, b, c)
        comm.reduce_scatter(c).wait()
        ledger.compare()
        return ledger.found

    assert run({"x": 2}, rank) == [[], []]


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("givers", [[0, 1, 2, 3], [2]])
def test_readers_of_a_shared_array_split_the_checks_of_all_senders(readers, givers):
    class Reader(Communicator):
        readers = property(lambda self: (self.rank % readers, readers))

    whole = np.zeros(len(givers))
    whole.flags.writeable = False
    watched = [
        CheckedCommunicator(Reader(rank, 4), AbftChecker(rank), "x").watched(whole, givers)
        for rank in range(readers)
    ]
    assert {giver for seen in watched for giver in seen} == {*givers}
    assert {len(seen) for seen in watched} == {max(1, len(givers) // readers)}
