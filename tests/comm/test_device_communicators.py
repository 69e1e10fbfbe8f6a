"""Communicators of devices that are threads (fake_device): all calls, the order of operations in
streams, and the lifetime of arrays."""

import numpy as np
import pytest

from hpc3d.comm import host_staged
from hpc3d.comm.threads import meshes, run
from tests.comm.cases import CASES, long_blocks
from tests.fakes.fake_device import DeviceArray, on_device, plain
from tests.mpi import checked
from tests.strided import strided


def on_devices(size, function, *how):
    """Call `function(comm)` on every rank, with communicators of devices."""

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank], *how) as device:
            return function(device.comm("x"))

    beside, _ = meshes({"x": size})

    return run({"x": size}, rank)


def fresh(comm, value, dtype=np.float64):
    """Return a block in the pool's memory."""
    block = comm.pool.empty((64, 8), dtype)
    block[...] = value
    return block


class Brought:
    """Device communicator for host blocks, which are copied to the device and back."""

    def __init__(self, comm):
        self.comm, self.rank, self.size, self.members = comm, comm.rank, comm.size, comm.members
        self.grouped, self.buffer = comm.grouped, lambda *how: plain(comm.buffer(*how))

    def recv(self, *how):
        return self.comm.recv(*how).then(plain)

    def __getattr__(self, name):
        def call(block, *how):
            return getattr(self.comm, name)(block.view(DeviceArray), *how).then(plain)

        return call


WAYS = (
    ("nccl", "float64"),
    ("host-staged", "float64"),
    ("host-staged", "float16"),
    ("mpi", "float16"),
)
FEW = [case for case in CASES if case.__name__ in ("send_and_recv", "in_flight")]


@pytest.mark.parametrize("size", strided([2, 3], 2, days=1))
@pytest.mark.parametrize(
    ("transport", "dtype", "case"),
    strided(
        [
            *((*way, case) for way in WAYS for case in CASES),
            *(("mpi-messages", "float16", case) for case in FEW),
            *(("mpi", "float64", case) for case in FEW),
        ],
        3,
        ids=lambda each: "-".join([*each[:2], each[2].__name__]),
    ),
)
def test_device_communicator_calls(transport, dtype, size, case, monkeypatch):
    if dtype == "float16" and case.__name__ == "adjoint":
        pytest.skip("its own inner products are too large for float16")
    monkeypatch.setattr(host_staged, "CHUNK", 1 << 16 if case is long_blocks else 200)
    on_devices(size, lambda comm: case(Brought(comm), dtype), transport)


@pytest.mark.slow
def test_device_communicators_on_mpi_ranks():
    """Tests the calls of mpi4py along two axes of a mesh, and of NCCL over a plane of all ranks,
    whose order differs from that of the ranks."""
    out = checked(4, "-m", "tests.comm.on_mpi_devices", timeout=200)
    assert out.splitlines() == [
        "mpi CudaAwareMpi CudaAwareMpi Self",
        "mpi-messages CudaAwareMessages CudaAwareMessages Self",
        "host-staged HostStaged HostStaged Self",
        "nccl Nccl Nccl Self",
        "plane Nccl",
    ]


@pytest.mark.parametrize("transport", ["host-staged", "mpi"], ids="by {}".format)  # mpi is a mark
def test_16_bit_blocks_move_unchanged_and_are_summed_in_float32(transport):
    """Sums may exceed float16 before rounding, and moves preserve all bits, also those of NaNs."""

    def rank(comm):
        block = fresh(comm, [60000.0, 60000.0, -60000.0][comm.rank], np.float16)
        total = comm.all_reduce(block).wait()
        block.view(np.uint16)[0, 0] = 0x7E55 + comm.rank  # a NaN of our own
        moved = comm.all_gather(block).wait().view(np.uint16)
        return moved[:: len(block), 0].tolist(), float(total.max())

    assert on_devices(3, rank, transport) == [([0x7E55, 0x7E56, 0x7E57], 60000.0)] * 3


def test_grouped_messages_in_both_directions_do_not_deadlock():
    """Each member sends before it receives; without `together`, both would wait forever."""

    def rank(comm):
        block = np.full((4, 2), comm.rank, np.float64).view(DeviceArray)
        with comm.grouped():
            sent, got = (
                comm.send(block, 1 - comm.rank),
                comm.recv((4, 2), np.float64, 1 - comm.rank),
            )
        sent.wait()
        return got.wait().tolist()

    assert on_devices(2, rank) == [[[1, 1]] * 4, [[0, 0]] * 4]


def test_tensor_parallel_calls_do_not_wait_for_gradient_reduction():
    """Replicas 1 post theirs only after the pass, so a single queue would cause a deadlock."""

    def rank(mesh):
        with on_device(mesh, beside[mesh.rank]) as device:
            data, tensor = device.comm("d"), device.comm("x")
            late = mesh.coord("d") == 1
            total = None if late else data.all_reduce(fresh(data, 1.0))
            whole = tensor.all_gather(fresh(tensor, 2.0)).wait()
            mesh.world.all_reduce(np.zeros(1)).wait()
            total = total or data.all_reduce(fresh(data, 1.0))
            return float(whole.max()), float(total.wait().max())

    beside, _ = meshes({"d": 2, "x": 2})
    assert run({"d": 2, "x": 2}, rank) == [(2.0, 2.0)] * 4
