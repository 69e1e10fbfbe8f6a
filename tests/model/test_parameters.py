"""Positions of parameters in the flat arrays, and the part that each replica owns."""

import numpy as np
import pytest

from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.comm.threads import run
from hpc3d.model.parameters import Parameters, no_matrix
from hpc3d.tensor.layout import Layout

SUMMED = {"partial": ("d",)}
WHOLE = Layout("", "")


def is_matrix(name, shape):
    return len(shape) > 1


def replica(data, rank, zero, add, whole_matrices=no_matrix, **sizes):
    """Return the parameters from `add(parameters)` on one of `data` replicas, without messages."""
    mesh = Mesh({"d": data, **sizes}, {"d": rank}, {}, Self())
    parameters = Parameters(mesh, "float64", zero, whole_matrices)
    add(parameters)
    parameters.allocate(seed=3)
    return parameters


def replicas(data, zero, add):
    return [replica(data, rank, zero, add) for rank in range(data)]


def updated(parameters):
    """Return the elements that a rank updates."""
    return sum(place.own for place in parameters.slices.values())


def two_vectors(parameters):
    parameters.add("a", (6,), Layout(""), **SUMMED)
    parameters.add("b", (5,), Layout(""), mean=1.0, **SUMMED)


def spans(part):
    return [(place.start, place.stop) for place in part]


def test_every_replica_owns_everything_without_zero():
    for parameters in replicas(2, 0, two_vectors):
        b, a = (parameters.slices[item] for item in parameters)
        assert spans(b) == [(0, 5)] * 4
        assert spans(a) == [(5, 11)] * 4


def test_each_replica_owns_an_equal_share_of_each_parameter_with_zero():
    """The last parameter comes first; 5 elements are padded to two shards of 3."""
    own = [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]
    for parameters, (of_b, of_a) in zip(replicas(2, 1, two_vectors), own):
        b, a = (parameters.slices[item] for item in parameters)
        assert spans(b) == [(0, 6), (0, 6), of_b, of_b]
        assert spans(a) == [(6, 12), (6, 12), of_a, of_a]
        assert (parameters.value.size, parameters.grad.size, updated(parameters)) == (12, 12, 6)


@pytest.mark.parametrize("zero", [0, 1])
def test_frozen_parameter_has_no_gradient_or_state(zero):
    """It is between two others; the first replica has the valid copy."""

    def add(parameters):
        parameters.add("a", (6,), Layout(""), **SUMMED)
        parameters.add("mean", (5,), Layout(""), frozen=True, mean=2.0)
        parameters.add("b", (4,), Layout(""), **SUMMED)

    for rank, parameters in enumerate(replicas(2, zero, add)):
        (frozen,) = (item for item in parameters if item.frozen)
        assert (frozen.value == 2).all() and frozen.grad is None
        assert parameters.counts(frozen) == (rank == 0)
        assert (parameters.value.size, parameters.grad.size) == (15, 10)
        assert updated(parameters) == (10 if zero == 0 else 5)
        pieces = sum(piece.value.stop - piece.value.start for piece in parameters.pieces)
        assert pieces == updated(parameters)


@pytest.mark.parametrize(("data", "rank"), [(2, 0), (2, 1), (3, 0), (3, 2)])
@pytest.mark.parametrize("zero", [2, 3])
def test_owned_share_of_a_matrix_is_its_gradient_block(zero, data, rank):
    """ZeRO-2 shards the gradient and ZeRO-3 also the value, in blocks of rows.

    Each of two or three replicas has two of four rows; the last of three has only padding.
    """

    def add(parameters):
        blocks = Layout("d", "", padded="d")
        layout = WHOLE if zero == 2 else blocks
        parameters.add("w", (4, 3), layout, grad_layout=blocks)

    parameters = replica(data, rank, zero, add)
    (item,) = parameters
    size, own = (6 * data, (6 * rank, 6 * rank + 6)) if zero == 2 else (6, (0, 6))
    assert spans(parameters.slices[item]) == [(0, size), (0, 6), own, (0, 6)]
    assert item.value.shape == ((4, 3) if zero == 2 else (2, 3))
    assert item.grad.shape == (2, 3)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("data", [1, 2, 3, 5])
def test_owned_shares_cover_each_parameter_once(data, zero):
    def add(parameters):
        for number, size in enumerate((7, 1, 30)):
            parameters.add(str(number), (size,), Layout(""), **SUMMED)

    count = 0
    for parameters in replicas(data, zero, add):
        owned = np.zeros(parameters.value.size, int)
        for place in parameters.slices.values():
            owned[place.own_value] += 1
            assert place.own == place.own_value.stop - place.own_value.start
        count = count + owned
    assert (count == (1 if zero else data)).all()


def test_replicas_start_with_equal_values_and_zero_padding():
    def add(parameters):
        parameters.add("w", (5, 3), WHOLE, std=0.5, **SUMMED)

    first, second = (parameters.value for parameters in replicas(2, 1, add))
    np.testing.assert_array_equal(first, second)
    assert first.size == 16 and first[15] == 0 and first[:15].all()


def test_parameters_are_ordered_by_reduction_axes_last_layer_first():
    def add(parameters):
        parameters.add("table", (4, 2), WHOLE, completed_last=True, **SUMMED)
        for number in range(2):
            parameters.add(f"layers.{number}.w", (4, 2), WHOLE)
            parameters.add(f"layers.{number}.b", (2,), Layout(""), **SUMMED)

    parameters = replica(2, 0, 0, add)
    names = [item.name for item in parameters]
    assert names == ["layers.1.w", "layers.0.w", "layers.1.b", "layers.0.b", "table"]
    starts = [parameters.slices[item].value.start for item in parameters]
    assert starts == [0, 8, 16, 18, 20]


def test_reduction_skips_axes_of_size_1_and_ends_with_the_data_axis():
    def add(parameters):
        parameters.add("a", (2,), Layout(""), partial=("d", "x", "y"))

    (item,) = replica(2, 0, 0, add, x=1, y=3)
    assert item.partial == ("y", "d")


def test_parameter_unit_is_the_module_that_completes_its_gradient():
    names = "layers.12.qkv.weight", "head.norm.gamma", "embedding.token"

    def add(parameters):
        for name in names:
            parameters.add(name, (2,), Layout(""))

    units = {item.name: item.unit for item in replica(1, 0, 0, add)}
    assert [units[name] for name in names] == ["layers.12", "head", "embedding"]


def pieces(zero):
    def add(parameters):
        for name, decay in (("a", True), ("b", False), ("c", True), ("d", False)):
            parameters.add(name, (4,), Layout(""), decay=decay, **SUMMED)

    return [(*spans(piece[:2]), piece.decay) for piece in replica(2, 1, zero, add).pieces]


def test_parameters_with_the_same_decay_are_updated_in_one_piece():
    assert pieces(0) == [((0, 8),) * 2 + (True,), ((8, 16),) * 2 + (False,)]
    # A replica's own parts do not touch each other.
    assert pieces(1) == [
        ((2, 4), (2, 4), True),
        ((6, 8), (6, 8), True),
        ((10, 12), (10, 12), False),
        ((14, 16), (14, 16), False),
    ]


def test_zero_3_matrices_are_updated_in_one_piece():
    def add(parameters):
        for name in "ab":
            parameters.add(name, (4, 3), Layout("d", ""), decay=True)

    (piece,) = replica(2, 1, 3, add).pieces
    assert (*spans(piece[:2]), piece.decay) == ((0, 12), (0, 12), True)


def matrices_and_a_vector(parameters):
    parameters.add("table", (2, 3), WHOLE, tied_peer=1, completed_last=True, **SUMMED)
    for name, rows in (("a", 5), ("b", 4), ("c", 3)):
        parameters.add(name, (rows, 2), WHOLE, decay=True, **SUMMED)
    parameters.add("v", (4,), Layout(""), **SUMMED)


def test_matrices_are_assigned_to_replicas_and_vectors_are_split():
    """The tied table is first; then the largest matrix goes to the least loaded replica."""
    found = [replica(2, rank, 1, matrices_and_a_vector, is_matrix) for rank in range(2)]
    for parameters in found:
        owners = {item.name: owner for item, owner in parameters.owners.items()}
        assert owners == {"table": 0, "a": 1, "b": 0, "c": 1}
    names = [{part.item.name for part in parameters.matrices} for parameters in found]
    assert names == [{"table", "b"}, {"a", "c"}]
    assert [updated(parameters) for parameters in found] == [6 + 8 + 2, 10 + 6 + 2]
    assert [len(parameters.pieces) for parameters in found] == [1, 1]
    assert [part.stop - part.start for part in found[1].pieces[0][:2]] == [2, 2]


def test_every_replica_updates_all_full_matrices_without_zero():
    parameters = replica(2, 1, 0, matrices_and_a_vector, is_matrix)
    shapes = {part.item.name: part.shape for part in parameters.matrices}
    assert shapes == {"table": (2, 3), "a": (5, 2), "b": (4, 2), "c": (3, 2)}
    assert not parameters.owners
    (piece,) = parameters.pieces
    assert piece.value == parameters.slices[parameters.items[3]].value


@pytest.mark.parametrize("zero", [2, 3])
def test_matrix_of_zero_2_and_3_is_a_block_of_rows(zero):
    def add(parameters):
        blocks = Layout("d", "")
        parameters.add("w", (4, 3), WHOLE if zero == 2 else blocks, grad_layout=blocks)

    parameters = replica(2, 1, zero, add, is_matrix)
    (part,) = parameters.matrices
    assert (part.shape, part.layout) == ((2, 3), Layout("d", ""))
    assert part.value == (slice(6, 12) if zero == 2 else slice(0, 6))
    assert part.grad == slice(0, 6) and not parameters.pieces


@pytest.mark.parametrize("zero", range(4))
def test_sum_of_squares_counts_each_element_once_over_all_ranks(zero):
    """All gradients are 1, so the sum is the number of elements, without the copy of a table."""

    def rank(mesh):
        parameters = Parameters(mesh, "float64", zero)
        rows = Layout("d" if zero == 3 else "", "x")
        grad = Layout("d" if zero > 1 else "", "x")
        parameters.add("w", (6, 4), rows, grad_layout=grad)
        parameters.add("b", (8,), Layout(""), partial=("d", "x"))
        parameters.add(
            "table", (4, 2), WHOLE, tied_peer=1 - mesh.coord("p"), completed_last=True, **SUMMED
        )
        parameters.allocate(1)
        for item in parameters:
            item.grad[...] = 1
        return parameters.sum_of_squares()

    squares = run({"p": 2, "d": 2, "x": 2}, rank)
    assert sum(squares) == 2 * 24 + 2 * 8 + 8


def test_copy_on_write_preserves_the_old_values():
    parameters = replica(1, 0, 0, two_vectors)
    old = parameters.value
    kept = {item.name: item.value for item in parameters}
    parameters.copy_on_write()
    parameters.value += 7
    assert (kept["a"] == 0).all() and (kept["b"] == 1).all()
    assert {item.name: item.value[0] for item in parameters} == {"a": 7, "b": 8}
    parameters.use(old)
    assert all(np.shares_memory(item.value, old) for item in parameters)
