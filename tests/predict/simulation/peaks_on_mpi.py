"""Memory peaks of a mix on the ranks of an MPI job, compared with predicted peaks."""

from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.cartesian import build
from hpc3d.predict.simulation.abstract_gpu import pool_of
from hpc3d.predict.simulation.count import ZeroBatches, predict
from hpc3d.training.evaluator import FrozenEvaluator, FrozenModel
from tests.pipeline.mixes import config_of, trainer_of
from tests.training.test_evaluator import Counted


def case(job, transport, line):
    """Compare the peaks of the second step, and of an evaluation of a FrozenModel, by kind."""
    config = config_of(line)
    mesh = build(config.sizes(), transport=transport)
    trainer = trainer_of(mesh, config)
    trainer.step(0)
    trainer.step(1)
    predicted = predict(config, config.model.vocabulary, mesh.coords)
    assert _present(mesh.pool.peak) == _present(predicted.peak)
    mesh = build(config.sizes(), transport=transport)
    FrozenEvaluator(
        FrozenModel(mesh, config), [Counted(config)] if mesh.rank == 0 else None
    ).evaluate(0)
    abstract = abstract_mesh(config.sizes(), mesh.coords, pool_of(config))
    evaluator = FrozenEvaluator(FrozenModel(abstract, config), None, feed=ZeroBatches)
    evaluator.counts = [Counted.count]
    evaluator.evaluate(0)
    assert _present(mesh.pool.peak) == _present(abstract.pool.peak)


def _present(peaks):
    return {kind: size for kind, size in peaks.items() if size}
