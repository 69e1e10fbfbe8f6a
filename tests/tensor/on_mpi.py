"""Cases of test_matmul on the ranks of an MPI job, with and without chunks; buffers are reused."""

import sys

from hpc3d.runtime import launch


def body(job):
    from hpc3d.comm.cartesian import build
    from tests.tensor.cases import SPLITS, sizes, splits
    from tests.tensor.test_matmul import compare

    cuboid = {8: (2, 2, 2), 12: (2, 3, 2)}[job.size]
    for name in SPLITS:
        mesh = build(sizes(name, cuboid), transport=sys.argv[1])
        mesh.splits = splits(name)
        compare(mesh)
        compare(mesh, chunks=3)
        if job.rank == 0:
            print(name, flush=True)
    job.barrier()
    if job.rank == 0:
        print("done")


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
