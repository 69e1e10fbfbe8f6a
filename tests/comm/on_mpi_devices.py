"""Cases of device communicators on real ranks, with every transport. Devices are simulated in host
memory, which MPI can read, and NCCL is simulated with MPI."""

import sys
from types import SimpleNamespace

from hpc3d.runtime import launch


def body(job):
    from hpc3d.comm.cartesian import build
    from hpc3d.cuda.device import Cuda
    from tests.comm.cases import CASES
    from tests.comm.test_device_communicators import Brought
    from tests.fakes import nccl_by_mpi
    from tests.fakes.fake_cupy import FakeCupy

    sys.modules["cupy.cuda"] = SimpleNamespace(nccl=nccl_by_mpi.library)
    sys.modules["cupy"] = SimpleNamespace(cuda=sys.modules["cupy.cuda"])
    device = Cuda(0, FakeCupy())
    for way in ("mpi", "mpi-messages", "host-staged", "nccl"):
        mesh = build({"d": job.size // 2, "x": 2, "y": 1}, transport=way, device=device)
        for axis in "dx":
            for case in CASES:
                exact = way != "nccl" and case.__name__ != "adjoint"
                for dtype in ("float32", "int32", "float16")[axis == "d" : 2 + exact]:
                    case(Brought(mesh.comm(axis)), dtype)
        assert mesh.pool.device is device and mesh.world.pool.device == "cpu"
        if job.rank == 0:
            print(way, *(type(mesh.comm(axis)).__name__ for axis in "dxy"), flush=True)
    assert len(device.aborts) == 3  # of all ranks, and of two axes
    plane = build({"d": job.size // 2, "c": 2}, transport="nccl", device=device).comm("c d")
    for case in CASES:
        case(Brought(plane), "float32")
    order = [rank for part in range(2) for rank in range(part, job.size, 2)]
    assert plane.members == tuple(order) and plane.rank == order.index(job.rank)
    if job.rank == 0:
        print("plane", type(plane).__name__, flush=True)
    job.barrier()


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
