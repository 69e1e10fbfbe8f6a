"""Peaks of memory of mixes on the ranks of an MPI job, one after the other: LINE ...

A line of JSON each: those of the second step by kind, for every rank.
"""

import json
import sys

from hpc3d.runtime import launch


def body(job):
    from hpc3d.comm.cartesian import build
    from tests.pipeline.mixes import config_of

    for line in sys.argv[1:]:
        peaks = job.comm.gather(peak(build, config_of(line)))
        job.barrier()
        if job.rank == 0:
            print(json.dumps([line, peaks]), flush=True)


def peak(build, config):
    """Of this rank."""
    from tests.pipeline.mixes import trainer_of

    mesh = build(config.mesh.sizes())
    trainer = trainer_of(mesh, config)
    trainer.step(0)
    trainer.step(1)
    return dict(mesh.pool.peak)


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
