"""The command `bench scaling`."""

import re
from pathlib import Path

import pytest

from hpc3d import bench
from hpc3d.benchmarks.scaling.points import CUBOID, SCHEMES
from tests.benchmarks.scaling.scaled import scaled


def test_predicted_table(capsys, tmp_path):
    out, rows = scaled(
        capsys, "--machine", "v100-4x16", "--ranks", "1,4,8", "--out", str(tmp_path)
    )
    point = rows["predicted", "1d", 4]
    # Each of two blocks has two all-reduces in a forward and two in a backward pass. The embedding
    # reduces its output, and the head the gradient of its input.
    activations = point["batch"] * 64 * point["hidden"] * 4
    assert point["received_bytes"] == pytest.approx(10 * 2 * 3 / 4 * activations, rel=0.002)
    assert point["sequence_s"] == (point["forward_s"] + point["backward_s"]) / point["batch"]
    assert point["growth"] == point["sequence_s"] / rows["predicted", "1d", 1]["sequence_s"]
    cuboids = [rows["predicted", CUBOID, ranks]["sequence_s"] for ranks in (1, 8)]
    assert cuboids[1] <= rows["predicted", "3d", 8]["sequence_s"]
    assert "3d: 4 ranks do not form a cube" in out
    assert "8 ranks: 3d is" in out
    written = {path.name for path in (tmp_path / "scaling").iterdir()}
    assert written == {f"weak.{kind}" for kind in ("csv", "md", "tex", "svg", "pdf", "png")}


def test_kind_of_rows_is_required(capsys):
    assert bench.main(["scaling"]) == 2
    assert "use --machine NAME, --measure or --runs DIR" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["weak", "strong"])
def test_times_on_the_page(kind, capsys, tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "scaling-study.md").read_text()
    command, *_ = re.findall(r"    python -m hpc3d.bench scaling (.*)", text)
    _, rows = scaled(capsys, *command.split(), f"--{kind}", "--out", str(tmp_path))
    head, _, *lines = text.partition(f"| scheme, {kind}")[2].split("\n\n")[0].splitlines()
    ranks = [int(cell) for cell in re.findall(r" (\d+) ", head)]
    assert len(lines) == len(SCHEMES)
    for scheme, line in zip(SCHEMES, lines, strict=True):
        name, *cells, _ = [cell.strip() for cell in line.strip("|").split("|")]
        found = [rows.get(("predicted", scheme, each)) for each in ranks]
        times = [f"{row['sequence_s'] * 1e3:.2f}" if row else "-" for row in found]
        assert (name, cells) == (scheme, times)
