"""Communication memory of a product on a cube: peak, memory afterwards, and blocks."""

import json
import sys

from hpc3d.runtime import launch


def body(job):
    import numpy as np

    from hpc3d.comm.cartesian import build
    from hpc3d.tensor.matmul import sharded_matmul
    from hpc3d.tensor.split import SCHEMES

    size, q, split = int(sys.argv[1]), int(sys.argv[2]), SCHEMES["3d"]
    mesh = build({"x": q, "y": q, "z": q}, transport=sys.argv[3])
    blocks = [np.ones(at.block((size, size), mesh)) for at in (split.x, split.w, split.y)]
    y, saved = sharded_matmul(mesh, split).forward_saving(*blocks[:2])
    assert (y == size).all()
    counted = mesh.pool.peak["communication"], mesh.pool.live["communication"]
    found = job.gather((*counted, [block.nbytes for block in blocks]))
    del saved
    if job.rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
