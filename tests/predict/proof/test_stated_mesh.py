"""States that collectives accept and return."""

import pytest

from hpc3d.predict.proof.states import LOCAL, PARTIAL, PARTS, UNKNOWN
from tests.predict.proof.programs import block, mesh_of

ROWS, COLUMNS = 0, PARTS


@pytest.mark.parametrize(
    ("call", "given", "returned"),
    [
        (lambda comm, a: comm.all_reduce(a), PARTIAL, None),
        (lambda comm, a: comm.all_reduce(a, "max"), LOCAL, None),
        (lambda comm, a: comm.reduce_scatter(a), PARTIAL, ROWS),
        (lambda comm, a: comm.reduce_scatter(a, 1), PARTIAL, COLUMNS),
        (lambda comm, a: comm.reduce(a, 0), PARTIAL, ROWS),
        (lambda comm, a: comm.all_gather(a), ROWS, None),
        (lambda comm, a: comm.all_gather(a, 1), COLUMNS, None),
        (lambda comm, a: comm.all_gather(a[None]), COLUMNS, None),
        (lambda comm, a: comm.broadcast(a, 0), ROWS, None),
        (lambda comm, a: comm.all_to_all(a), ROWS, COLUMNS),
        (lambda comm, a: comm.all_to_all(a), COLUMNS, PARTS - 1),
    ],
)
def test_collectives_change_the_state_along_their_axis(call, given, returned):
    mesh = mesh_of(x=2, y=2)
    result = call(mesh.comm("x"), block(mesh, (4, 6), x=given, y=UNKNOWN)).wait()
    assert result.states == ({} if returned is None else {"x": returned}) | {"y": UNKNOWN}


@pytest.mark.parametrize(
    ("call", "state"),
    [
        (lambda comm, a: comm.all_reduce(a), None),
        (lambda comm, a: comm.all_reduce(a), ROWS),
        (lambda comm, a: comm.all_reduce(a, "max"), PARTIAL),
        (lambda comm, a: comm.reduce_scatter(a), None),
        (lambda comm, a: comm.reduce(a, 0), ROWS),
        (lambda comm, a: comm.all_gather(a), None),
        (lambda comm, a: comm.all_gather(a), PARTIAL),
        (lambda comm, a: comm.all_gather(a), COLUMNS),
        (lambda comm, a: comm.broadcast(a, 0), None),
        (lambda comm, a: comm.broadcast(a, 0), PARTIAL),
        (lambda comm, a: comm.all_to_all(a), None),
    ],
)
def test_collectives_refuse_other_states(call, state):
    mesh = mesh_of(x=2)
    states = {} if state is None else {"x": state}
    with pytest.raises(ValueError, match=r"along axis x: the block .* is .*; it must be"):
        call(mesh.comm("x"), block(mesh, (4, 6), **states))


def test_a_collective_over_several_axes_changes_all_of_them():
    mesh = mesh_of(c=2, d=2)
    total = mesh.comm("c d").all_reduce(block(mesh, (4, 6), c=PARTIAL, d=PARTIAL)).wait()
    assert total.states == {}
    with pytest.raises(ValueError, match=r"along axis d: the block .* is replicated"):
        mesh.comm("c d").all_reduce(block(mesh, (4, 6), c=PARTIAL))


def test_a_received_block_has_the_state_of_the_sent_block():
    mesh = mesh_of(c=2)
    comm, sent = mesh.comm("c"), block(mesh, (2, 4, 6), c=COLUMNS)
    comm.send(sent, 1).wait()
    assert comm.recv(sent.shape, sent.dtype, 1).wait().states == {"c": COLUMNS}
    comm.send(sent.reshape(8, 6), 1).wait()
    assert comm.recv((8, 6), sent.dtype, 1).wait().states == {"c": UNKNOWN}
