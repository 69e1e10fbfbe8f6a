"""Choose the device of each rank and the transport of the job, consistently on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hpc3d.comm.mesh import Mesh
    from hpc3d.cuda.device import Cuda
    from hpc3d.runtime.host_map import Homes
    from hpc3d.runtime.job import Job


class Hardware(NamedTuple):
    """Device and transport of a rank.

    `device` is `None` on a CPU, `transport` is the name of a transport in hpc3d.comm.transport,
    `lines` are log lines that explain the choice, and `homes` maps all ranks to their hosts.
    """

    device: Cuda | None
    transport: str
    lines: tuple[str, ...] = ()
    homes: Homes | None = None

    def with_line(self, line: str) -> Hardware:
        return self._replace(lines=(*self.lines, line))


def hardware(job: Job, config: Any) -> Hardware:
    """Return the device and transport of this rank for `config`, as a `Hardware`.

    With `train.backend = cupy`, the device becomes the current device.  If any rank does
    not meet a requirement, all ranks exit with an error message.
    """
    train, asked = config.train, config.mesh.transport
    if train.backend == "numpy":
        return Hardware(None, asked)
    from hpc3d.comm import transport

    return Hardware(*transport.choose_transport(job, asked, train.dtype))


def mesh_of(job: Job, config: Any) -> Mesh:
    """Build the mesh of a job that only runs forward passes, on the devices of its ranks.

    `config` must be resolved. All ranks must call this function.
    """
    from hpc3d.comm.cartesian import build

    ours = hardware(job, config)
    mesh = build(config.sizes(), transport=ours.transport, device=ours.device)
    if ours.device:
        from hpc3d.cuda.gpu import use

        pool: Any = mesh.pool
        job.exit_hooks.append(ours.device.close)
        use(pool, config.train.tf32)
    return mesh
