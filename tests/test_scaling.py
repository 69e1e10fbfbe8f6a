"""The command `bench scaling`."""

import json
import re
from pathlib import Path

import pytest

from hpc3d import bench
from hpc3d.benchmarks.scaling.growth import theory
from hpc3d.benchmarks.scaling.points import CUBOID, SCHEMES, mesh_of, points
from hpc3d.config.load import load
from hpc3d.config.package_data import shipped

CONFIG = load(shipped("gpt-3d-64.toml"), [])


def scaled(capsys, *words):
    """Run `bench scaling`; return its output and the dict from (kind, scheme, ranks) to rows."""
    assert bench.main(["scaling", *words, "--json"]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    return out, {(row["kind"], row["scheme"], row["ranks"]): row for row in rows}


@pytest.mark.parametrize(
    ("scheme", "ranks", "mesh"),
    [
        ("1d", 27, (27, 1, 1)),
        ("2d-summa", 36, (6, 6, 1)),
        ("2.5d", 64, (4, 4, 4)),
        ("2.5d", 32, (4, 4, 2)),
        ("3d", 27, (3, 3, 3)),
        ("3d", 1, (1, 1, 1)),
        ("2d-summa", 8, "2d-summa: 8 ranks do not form a square"),
        ("2.5d", 16, "2.5d: 16 ranks do not form a q x q x d grid with 1 < d <= q"),
        ("3d", 4, "3d: 4 ranks do not form a cube"),
    ],
)
def test_mesh_of_scheme(scheme, ranks, mesh):
    assert mesh_of(scheme, ranks) == mesh


def test_work_per_rank_is_constant_in_weak_scaling():
    found, _ = points(CONFIG, [1, 8, 27, 64], SCHEMES, weak=True)
    work = [point.hidden**2 * point.batch / point.ranks for point in found]
    assert max(work) / min(work) < 1.1
    assert {(point.hidden, point.batch) for point in found if point.ranks == 64} == {(384, 192)}


def test_work_is_constant_in_strong_scaling():
    found, _ = points(CONFIG, [1, 8, 64], ["1d", "3d"], weak=False)
    assert {(point.hidden, point.batch) for point in found} == {(384, 192)}


def test_predicted_table(capsys, tmp_path):
    out, rows = scaled(
        capsys, "--machine", "v100-4x16", "--ranks", "1,4,8", "--out", str(tmp_path)
    )
    point = rows["predicted", "1d", 4]
    # Each of two blocks has two all-reduces in a forward and two in a backward pass. The embedding
    # reduces its output, and the head the gradient of its input.
    activations = point["batch"] * CONFIG.model.sequence * point["hidden"] * 4
    assert point["received_bytes"] == pytest.approx(10 * 2 * 3 / 4 * activations, rel=0.002)
    assert point["sequence_s"] == (point["forward_s"] + point["backward_s"]) / point["batch"]
    assert point["growth"] == point["sequence_s"] / rows["predicted", "1d", 1]["sequence_s"]
    cuboids = [rows["predicted", CUBOID, ranks]["sequence_s"] for ranks in (1, 8)]
    assert cuboids[1] <= rows["predicted", "3d", 8]["sequence_s"]
    assert "3d: 4 ranks do not form a cube" in out
    assert "8 ranks: 3d is" in out
    written = {path.name for path in (tmp_path / "scaling").iterdir()}
    assert written == {f"weak.{kind}" for kind in ("csv", "md", "tex", "svg", "pdf", "png")}


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
    assert again["measured", "2d-summa", 4] == rows["measured", "2d-summa", 4]


def test_kind_of_rows_is_required(capsys):
    assert bench.main(["scaling"]) == 2
    assert "use --machine NAME, --measure or --runs DIR" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_times_on_the_page(kind, capsys, tmp_path):
    text = (Path(__file__).parents[1] / "docs" / "scaling-study.md").read_text()
    (command,) = re.findall(r"    python -m hpc3d.bench scaling (.*)", text)
    _, rows = scaled(capsys, *command.split(), f"--{kind}", "--out", str(tmp_path))
    head, _, *lines = text.partition(f"| scheme, {kind}")[2].split("\n\n")[0].splitlines()
    ranks = [int(cell) for cell in re.findall(r" (\d+) ", head)]
    assert len(lines) == len(SCHEMES)
    for scheme, line in zip(SCHEMES, lines, strict=True):
        name, *cells, _ = [cell.strip() for cell in line.strip("|").split("|")]
        found = [rows.get(("predicted", scheme, each)) for each in ranks]
        times = [f"{row['sequence_s'] * 1e3:.2f}" if row else "-" for row in found]
        assert (name, cells) == (scheme, times)
