"""Predicted = counted: the peak of every kind of memory on every rank of a real job, where
techniques that save memory are mixed."""

import json

import pytest

from hpc3d.predict.simulation.count import every_rank
from tests.mpi import checked
from tests.pipeline.mixes import config_of

# On four ranks each.
FEW = """
dtype=bfloat16 d=2 x=2 zero=1 microbatches=2 recompute=[0,2] keep_dtype=int8 optimizer=lion
dtype=bfloat16 d=2 x=2 zero=1 microbatches=2 optimizer=adamw-8bit hidden=64 heads=4 vocabulary=32
dtype=float32 d=2 x=2 zero=1 microbatches=2 'offload=["optimizer","activations"]' keep_dtype=int8
""".strip().splitlines()
MORE = """
dtype=float16 p=2 x=2 schedule=1f1b microbatches=4 recompute=full optimizer=adafactor
dtype=float32 x=2 y=2 microbatches=2 keep_dtype=bfloat16 optimizer=adafactor keep_gathered=false
dtype=float32 d=2 p=2 schedule=zb-h1 microbatches=4 zero=1 compression=powersgd
dtype=bfloat16 d=4 zero=3 microbatches=2 recompute=selective optimizer=muon
dtype=float32 d=2 x=2 zero=1 microbatches=2 keep_dtype=int8 recompute=[1] reduce_dtype=bfloat16
dtype=bfloat16 d=2 y=2 microbatches=2 compression=top-k optimizer=sgd attention=chunked
dtype=bfloat16 p=2 d=2 schedule=zb-v chunks=2 microbatches=4 keep_dtype=int8 optimizer=adafactor
dtype=float32 p=2 d=2 schedule=interleaved chunks=2 microbatches=4 zero=2 keep_dtype=bfloat16
dtype=bfloat16 c=2 x=2 sequence=8 microbatches=2 attention=chunked recompute=full optimizer=muon
dtype=float32 d=2 e=2 experts=4 microbatches=2 zero=1 keep_dtype=int8 optimizer=lion
dtype=bfloat16 p=2 d=2 schedule=1f1b microbatches=4 'offload=["activations","parameters"]'
""".strip().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("lines", [FEW, MORE], ids=["few", "more"])
def test_peaks_of_mixes_are_counted_ones(lines):
    out = checked(4, "-m", "tests.predict.simulation.peaks_on_mpi", *lines)
    counted = dict(map(json.loads, out.splitlines()))
    assert [*counted] == lines
    for line, ranks in counted.items():
        config = config_of(line)
        predicted = every_rank(config, config.model.vocabulary)
        for rank, (ours, theirs) in enumerate(zip(predicted, ranks, strict=True)):
            assert _present(ours.peak) == _present(theirs), (line, rank)


def _present(peaks):
    return {kind: size for kind, size in peaks.items() if size}
