"""Cases of test_parallel on the ranks of an MPI job."""

import sys

from hpc3d.runtime import launch


def body(job):
    from hpc3d.comm.cartesian import build
    from tests.model.test_parallel import KINDS, gradients, same, serial
    from tests.tensor.cases import SPLITS, sizes

    cuboid = {8: (2, 2, 2), 12: (2, 3, 2)}[job.size]
    kinds = {name: KINDS[name] for name in ("untied, exact, dropout", "llama")}
    expected = {name: serial(kind) for name, kind in kinds.items()}
    for name, split in SPLITS.items():
        mesh = build(sizes(name, cuboid), transport=sys.argv[1])
        for kind, model in kinds.items():
            same(gradients(mesh, split, model), expected[kind])
        if job.rank == 0:
            print(name, flush=True)
    job.barrier()
    if job.rank == 0:
        print("done")


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
