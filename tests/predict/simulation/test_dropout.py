"""Predicted memory and memory traffic of dropout and of soft caps, compared with runs."""

from collections import Counter

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.arrays.abstract import AbstractPool, CostMeter
from hpc3d.comm.threads import run
from hpc3d.ops.attention import HeadForm, attend, attend_grad
from hpc3d.ops.random import Mask, philox_key
from hpc3d.predict.simulation.count import every_rank
from hpc3d.predict.simulation.simulator import load_resolved
from hpc3d.training.trainer import Trainer
from tests.pipeline.mixes import Tokens, config_of
from tests.runs import train, words

# Threads hold messages in other places than ranks of a node, which are predicted.
ALONE = """
microbatches=3
microbatches=3 recompute=selective sequence=6
microbatches=2 recompute=full gelu=exact
schedule=zb-v chunks=2 microbatches=3
schedule=zb-v chunks=2 microbatches=3 recompute=selective
microbatches=3 kind=gemma2 score_cap=1 logit_cap=1
""".strip().splitlines()
PIPELINES = """
p=4 schedule=gpipe microbatches=6
p=2 schedule=zb-h1 microbatches=4 recompute=full
p=4 d=2 schedule=zb-h2 microbatches=4 zero=3
""".strip().splitlines()


def peaks(line):
    """Return the predicted and counted peaks of every rank by kind."""
    config = config_of(f"{line} dropout=0.25")

    def rank(mesh):
        batches = Tokens(config) if mesh.rank == 0 else None
        trainer = Trainer(mesh, config, config.model.vocabulary, batches)
        trainer.step(0)
        trainer.step(1)
        return Counter(mesh.pool.peak)

    predicted = [Counter(found.peak) for found in every_rank(config, config.model.vocabulary)]
    return predicted, run(config.sizes(), rank)


@pytest.mark.parametrize("line", ALONE)
def test_predicted_rank_memory_matches_a_run(line):
    predicted, counted = peaks(line)
    assert predicted == counted


@pytest.mark.parametrize("line", PIPELINES)
def test_predicted_pipeline_activations_match_a_run(line):
    for predicted, counted in zip(*peaks(line), strict=True):
        assert predicted["activation"] == counted["activation"] > 0


@pytest.mark.slow
def test_predicted_peaks_match_mpi_ranks(tmp_path):
    """Tests every kind of memory of a cube of ranks, in the second step."""
    layout = {"mesh__x": 2, "mesh__y": 2, "mesh__z": 2, "parallel__recompute": "selective"}
    layout["model__dropout"] = 0.1
    folder = train(8, tmp_path, train__steps=2, **layout)
    config = load_resolved(None, words(tmp_path, **layout), 8)
    with trace.open(folder / "trace.h5") as opened:
        memory, names = opened.memory.columns(), opened.memory.labels("kind")
    second = memory["step"] == 1
    for rank, predicted in enumerate(every_rank(config, config.model.vocabulary)):
        mine = second & (memory["rank"] == rank)
        kinds = [names[kind] for kind in memory["kind"][mine]]
        counted = dict(zip(kinds, memory["peak"][mine].tolist(), strict=True))
        assert counted and counted == {kind: predicted.peak.get(kind, 0) for kind in counted}


class Told(CostMeter):
    def __init__(self):
        self.kernels, self.products = Counter(), Counter()

    def kernel(self, name, nbytes):
        self.kernels[name] += nbytes

    def product(self, m, n, k, dtype, batch=1):
        self.products[m, n, k] += batch


@pytest.mark.parametrize("dropout", [False, True])
def test_attention_reports_its_dropout_traffic(dropout):
    """The probabilities are read and written once more in each pass."""
    batch, heads, sequence, width = 3, 4, 16, 8
    pool = AbstractPool(Told())
    qkv = pool.empty((batch * sequence, heads * 3 * width), np.float32)
    columns = heads * sequence**2
    drop = (
        Mask(philox_key((1, "p")), 0.1, range(batch), range(columns), columns) if dropout else None
    )
    form = HeadForm(width)
    out, probabilities = attend(qkv, sequence, form, pool.empty, drop)
    attend_grad(out, qkv, probabilities, sequence, form, pool.empty, drop)
    sides, scores = qkv.nbytes + out.nbytes, 4 * batch * columns
    expected = {"attend": sides + scores, "attend_grad": sides + scores + qkv.nbytes}
    expected |= {"dropped": 4 * scores} if dropout else {}
    assert pool.meter.kernels == expected


@pytest.mark.parametrize("cap", [0.0, 0.7])
def test_attention_reports_the_products_and_the_traffic_of_its_soft_cap(cap):
    """The backward pass computes the scores again and reads them with their gradient."""
    batch, heads, sequence, width = 3, 4, 16, 8
    pool = AbstractPool(Told())
    qkv = pool.empty((batch * sequence, heads * 3 * width), np.float32)
    form = HeadForm(width, cap=cap)
    out, probabilities = attend(qkv, sequence, form, pool.empty)
    scores = probabilities.nbytes
    attend_grad(out, qkv, probabilities, sequence, form, pool.empty)
    inward, outward = (sequence, sequence, width), (sequence, width, sequence)
    assert pool.meter.products == {
        inward: batch * heads * (3 + (cap > 0)),
        outward: batch * heads * 3,
    }
    caps = {name: pool.meter.kernels[name] for name in ("soft_cap", "soft_cap_grad")}
    assert caps == (
        {"soft_cap": 2 * scores, "soft_cap_grad": 3 * scores} if cap else dict.fromkeys(caps, 0)
    )
