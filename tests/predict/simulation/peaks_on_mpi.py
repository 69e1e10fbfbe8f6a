"""Memory peaks of a mix on the ranks of an MPI job, compared with predicted peaks."""

from hpc3d.comm.cartesian import build
from hpc3d.predict.simulation.count import predict
from tests.pipeline.mixes import config_of, trainer_of


def case(job, transport, line):
    """Compare the peaks of the second step by kind."""
    config = config_of(line)
    mesh = build(config.sizes(), transport=transport)
    trainer = trainer_of(mesh, config)
    trainer.step(0)
    trainer.step(1)
    predicted = predict(config, config.model.vocabulary, mesh.coords)
    assert _present(mesh.pool.peak) == _present(predicted.peak)


def _present(peaks):
    return {kind: size for kind, size in peaks.items() if size}
