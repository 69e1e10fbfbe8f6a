"""Predicted peaks of array memory, compared with those of real ranks, by rank and kind."""

import pytest

from hpc3d import trace
from hpc3d.predict.simulation.count import every_rank
from hpc3d.predict.simulation.simulator import load_resolved
from tests.runs import train, words

LAYOUTS = [
    {
        "mesh__p": 2,
        "mesh__d": 2,
        "parallel__zero": 1,
        "parallel__microbatches": 4,
        "parallel__compression": "powersgd",
        "parallel__bucket_mb": 0.5,
    },
    {"mesh__c": 2, "mesh__x": 2, "parallel__microbatches": 2, "model__sequence": 256},
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=["compression", "context"])
def test_predicted_peaks_match_measured_ones(layout, tmp_path):
    """With shared memory, kinds with at least 1 % of the total are within 2 %."""
    folder = train(4, tmp_path, train__steps=2, **layout)
    config = load_resolved(None, words(tmp_path, **layout), 4)
    predicted = every_rank(config, config.model.vocabulary)
    with trace.open(folder / "trace.h5") as opened:
        memory, names = opened.memory.columns(), opened.memory.labels("kind")
    for rank, number, kind, peak in zip(*(memory[n] for n in ("rank", "step", "kind", "peak"))):
        if number == 1:
            found = predicted[rank].peak
            room = 0.02 * max(peak, 0.01 * found["all"])
            assert abs(found.get(names[kind], 0) - peak) <= room, (rank, names[kind])
