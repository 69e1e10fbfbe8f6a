"""Predicted and measured rows of a scaling table."""

import pytest

from hpc3d.benchmarks.scaling.points import CUBOID
from tests.benchmarks.scaling.scaled import scaled


@pytest.mark.slow
def test_measured_bytes_and_memory_equal_predicted_values(capsys, tmp_path):
    words = ["--machine", "v100-4x16", "--measure", "--rounds", "1", "--ranks", "1,4"]
    words += ["--schemes", f"2d-summa,{CUBOID}", "--out", str(tmp_path)]
    _, rows = scaled(capsys, *words, "--train.batch", "8", "--model.hidden", "32")
    for scheme in ("2d-summa", CUBOID):
        predicted, measured = rows["predicted", scheme, 4], rows["measured", scheme, 4]
        assert measured["received_bytes"] == predicted["received_bytes"] > 0
        assert measured["peak_bytes"] == predicted["peak_bytes"]
    _, again = scaled(capsys, "--runs", str(tmp_path / "scaling/runs"), "--out", str(tmp_path))
    assert again["measured", CUBOID, 1]["peak_bytes"] == rows["measured", CUBOID, 1]["peak_bytes"]
    assert again["measured", "2d-summa", 4] == rows["measured", "2d-summa", 4]
