"""Every layout that the rules allow can be run: all blocks divide evenly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.predict.simulation.count import predict

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.slow
@given(
    scheme=st.sampled_from(["1d", "1d-sequence", "2d", "2d-summa", "2.5d", "3d"]),
    mesh=st.fixed_dictionaries({axis: SIZES for axis in "dxyz"}),
    hidden=st.sampled_from([(48, 12), (72, 24), (96, 16), (144, 24)]),
    sequence=st.sampled_from([2, 4, 6]),
    batch=st.sampled_from([4, 12, 16, 144]),
    zero=st.integers(0, 3),
)
def test_every_allowed_layout_can_be_predicted(scheme, mesh, hidden, sequence, batch, zero):
    words = {
        "parallel.scheme": scheme,
        "parallel.zero": zero,
        "model.hidden": hidden[0],
        "model.heads": hidden[1],
        "model.sequence": sequence,
        "train.batch": batch,
        **{f"mesh.{axis}": size for axis, size in mesh.items()},
    }
    options = [str(word) for key, value in words.items() for word in (f"--{key}", value)]
    ranks = mesh["d"] * mesh["x"] * mesh["y"] * mesh["z"]
    try:
        config = resolve(load(None, options), ranks)
    except ValueError:
        return
    last = {axis: size - 1 for axis, size in config.sizes().items()}
    for coords in (dict.fromkeys(last, 0), last):
        predict(config, 256, coords)
