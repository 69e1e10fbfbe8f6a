"""Exponents of growth."""

import pytest

from hpc3d.benchmarks.scaling.growth import theory
from tests.benchmarks.scaling.scaled import scaled


@pytest.mark.parametrize(
    ("scheme", "quantity", "limits"),
    [
        ("1d", "ranks", (2 / 3, 2 / 3)),
        ("2d-summa", "ranks", (1 / 6, 1 / 6)),
        ("2.5d", "ranks", (0, 1 / 3)),
        ("3d", "ranks", (0, 0)),
        ("1d", "hidden", (1, 1)),
        ("3d", "hidden", (1, 2)),
        ("3d", "tokens", (0, 1)),
        ("3d", "layers", (1, 1)),
    ],
)
def test_theoretical_exponent_of_received_bytes(scheme, quantity, limits):
    assert theory(scheme, quantity) == pytest.approx(limits)


def test_fitted_exponents(capsys, tmp_path):
    words = ["--machine", "v100-4x16", "--schemes", "1d,3d", "--out", str(tmp_path)]
    out, rows = scaled(capsys, *words, "--grow", "tokens", "--ranks", "8")
    assert {scheme for _, scheme, _ in rows} == {"1d", "3d"}
    fitted = {
        cells[2].strip(): [*map(str.strip, cells[3:7])]
        for line in out.splitlines()
        if len(cells := line.split("|")) == 8
    }
    # 1-D sends activations only, and 3-D also sends weights.
    assert fitted["1d"][1:3] == ["1.00", "1.00"]
    assert 0 < float(fitted["3d"][1]) < 1
    assert (tmp_path / "scaling/tokens.csv").read_text().count("\n") == 1 + 2 * 4
