"""Predicted bytes and FLOPs of text generation, compared with a run."""

import numpy as np
import pytest

from hpc3d.comm import threads
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.model.decoder import Decoder
from hpc3d.predict.simulation.memory_recorder import MemoryRecorder
from hpc3d.training.trainer import spec_of
from tests.model.test_decoder import COMMON, KINDS, MIXTURES, SEQUENCE
from tests.pipeline.mixes import config_of

COUNTED = ["op", "bytes", "flops", "group"]


def counted(mesh, config):
    """Return the events of a prompt of 4 tokens and of one more token."""
    recorder = MemoryRecorder(mesh.rank, lambda: 0)
    spec = spec_of(config, config.model.vocabulary)
    decoder = Decoder(mesh.traced(recorder), spec, "float64", SEQUENCE)
    recorder.count = 0
    for count in (4, 1):
        decoder.forward(np.zeros((8, count), int))
    return recorder.rows()[COUNTED]


# Without a capacity limit, the number of slots depends on the tokens.
LIMITED = [line.replace("capacity=0", "capacity=2") for line in MIXTURES]


@pytest.mark.parametrize("kind", [*KINDS[:3], *LIMITED])
@pytest.mark.parametrize(
    "mesh", ["x=2 y=2 z=2 scheme=3d", "x=2 y=2 scheme=2d-summa", "x=4 scheme=1d"]
)
def test_predicted_generation_traffic_and_flops_match_a_run(kind, mesh):
    config = config_of(f"{COMMON} {kind} {mesh}")
    sizes = config.sizes()
    found = threads.run(sizes, lambda mesh: counted(mesh, config))
    for rank, events in enumerate(found):
        expected = counted(abstract_mesh(sizes, config.grid().coords(rank)), config)
        np.testing.assert_array_equal(events, expected)
    assert found[0]["bytes"].sum() and found[0]["flops"].sum()


def test_attention_flops_grow_with_the_cached_length():
    """Each of 2 layers has 4 T D for each of 12 heads of width 2 and 8 sequences."""
    config = config_of(COMMON)
    events = counted(abstract_mesh({}, {}), config)
    products = {"gemm": 8 * 5 * 2 * 2 * 12 * 24**2 + 2 * 2 * 8 * 29 * 24}
    products["attention"] = 2 * 8 * 12 * 4 * 2 * (4 * 4 + 5)
    assert events["flops"].sum() == sum(products.values())
