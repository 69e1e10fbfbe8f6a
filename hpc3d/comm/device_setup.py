"""What a rank computes on and how ranks talk: settled once, the same way on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hpc3d.cuda.device import Cuda
    from hpc3d.runtime.host_map import Homes
    from hpc3d.runtime.job import Job

_RECORDED = ("none", "nccl")  # ways that a CUDA graph can have in it


class Hardware(NamedTuple):
    """The `device` of a rank (None: its CPU core), the way of hpc3d.comm.transport that its
    blocks go, the `lines` that say so, and the Homes of all ranks."""

    device: Cuda | None
    transport: str
    lines: tuple[str, ...] = ()
    homes: Homes | None = None

    def with_line(self, line: str) -> Hardware:
        return self._replace(lines=(*self.lines, line))


def hardware(job: Job, config: Any) -> Hardware:
    """The Hardware of this rank that a Config asks for.

    With a backend cupy the device is the current one from here on, and the job is refused on all
    ranks where one of them lacks something.
    """
    train, asked = config.train, config.mesh.transport
    if train.backend == "numpy":
        return Hardware(None, asked)
    from hpc3d.comm import transport

    found = Hardware(*transport.choose_transport(job, asked, train.dtype))
    if train.cuda_graph and found.transport not in _RECORDED:
        job.refuse(
            f"train.cuda_graph = true: transport {found.transport} needs the host in every step; "
            "use train.cuda_graph = false, or mesh.transport = nccl with a device for each rank"
        )
    return found
