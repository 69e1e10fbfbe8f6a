"""One of several ranks that train on one GPU:

    mpirun -np N python -m mpi4py -m tests.gpu.rank BACKEND TRANSPORT key=value ...

With the TRANSPORT `serial`, there is one rank and no MPI. Rank 0 prints losses and norms.
"""

import contextlib
import json
import sys
import time

from hpc3d.training.trainer import Trainer
from tests.gpu.trainers import Noise, config_of, on, on_numpy

SIZES = {"layers": 4, "hidden": 128, "heads": 8, "sequence": 64, "batch": 16, "vocabulary": 256}
STEPS = 5


def main(backend, transport, *words):
    values = {key: typed(text) for key, text in (word.split("=", 1) for word in words)}
    config = config_of(backend, steps=STEPS, **{**SIZES, **values})
    mesh = alone(backend) if transport == "serial" else among(backend, transport, config)
    batches = Noise(config) if mesh.rank == 0 else None
    trainer = Trainer(mesh, config, config.model.vocabulary, batches)
    assert (trainer.replay is not None) == config.train.cuda_graph
    steps, start = [], time.perf_counter()
    for number in range(STEPS):
        steps.append(trainer.step(number))
    if mesh.rank == 0:
        seconds = (time.perf_counter() - start) / STEPS
        losses, norms = [step.loss for step in steps], [step.grad_norm for step in steps]
        result = {"losses": losses, "norms": norms, "seconds": seconds}
        print(f"RESULT {json.dumps(result)}", flush=True)


def typed(text):
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def alone(backend):
    if backend == "numpy":
        return on_numpy()
    from tests.gpu.device import Gpu

    return on(Gpu())


def among(backend, transport, config):
    """Return the mesh of an MPI job."""
    from mpi4py import MPI

    from hpc3d.comm.cartesian import build

    if backend == "numpy":
        return build(config.sizes())
    from hpc3d.cuda.gpu import use

    mesh = build(config.sizes(), MPI.COMM_WORLD, transport, bound(MPI))
    use(mesh.pool)
    return mesh


def bound(MPI):
    """Return the device of this rank, by its rank on this host."""
    import cupy

    from hpc3d.cuda.device import Cuda

    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank
    return Cuda(local % cupy.cuda.runtime.getDeviceCount())


if __name__ == "__main__":
    main(*sys.argv[1:])
