"""Trace recorder of a run, and the description of its environment."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d import __version__
from hpc3d.config.load import to_toml
from hpc3d.runtime.environment import cores_of_node

if TYPE_CHECKING:
    from hpc3d.arrays.pool import Pool
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.runtime.job import Job
    from hpc3d.trace.recorder import Recorder

_Texts = Mapping[str, Mapping[str, Any]]  # descriptions of the data files, by key

# Two clock functions for each value of `trace.clock`: one in ns for the trace, and one in s for
# the training loop.
CLOCKS = {
    "wall": (time.monotonic_ns, time.monotonic),
    "cpu": (time.process_time_ns, time.process_time),
}


def recorded(
    job: Job, mesh: Mesh, config: Config, folder: Path, transport: str, git: str, texts: _Texts
) -> Mesh:
    """Add a trace recorder to the mesh if the run is traced; rank 0 writes environment.json."""
    location = {**job.location(), "device": str(mesh.pool.device)}
    locations = job.gather(location)
    sizes = zip(*job.gather([*mesh.sizes.values()]), strict=True)  # d may vary between stages
    if job.rank == 0:
        from hpc3d.training.run_folder import describe

        describe(folder, locations, job.library(), texts)
    if not config.trace.enabled:
        return mesh
    from hpc3d.trace.clock import Clocks

    header = {
        "rank": job.rank,
        "world_size": job.size,
        "axes": list(mesh.sizes),
        "axis_sizes": [*map(max, sizes)],
        "coords": [mesh.coord(axis) for axis in mesh.sizes],
        **location,
        "transport": transport,
        "cores": cores_of_node(),
        "run_id": folder.name,
        "created_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "time_unit": "ns",
        "config": to_toml(config),
        "git": git,
        "mpi": job.library(),
        "version": __version__,
    }
    recorder = recorder_of(folder, header, mesh.pool, config)
    if config.trace.clock == "wall":
        nodes = [location["node"] for location in locations]
        recorder.clocks = Clocks(mesh.world, nodes, recorder.clock)
    job.exit_hooks.append(recorder.flush)
    return mesh.traced(recorder)


def recorder_of(folder: Path, header: dict[str, Any], pool: Pool, config: Config) -> Recorder:
    """Create this rank's trace recorder; it records device times unless the backend is NumPy."""
    clock, _ = CLOCKS[config.trace.clock]
    if config.train.backend == "numpy":
        from hpc3d.trace.recorder import Recorder

        return Recorder(folder, header, clock=clock)
    from hpc3d.trace.device_recorder import DeviceRecorder

    cuda, nvtx = pool.device.cupy.cuda, config.trace.nvtx
    timing = cuda.Event, cuda.get_elapsed_time
    ranges = (cuda.nvtx.RangePush, cuda.nvtx.RangePop) if nvtx else None
    return DeviceRecorder(folder, header, pool.device, timing, ranges, clock=clock)
