"""The diagram of a plan contains every atom, value and boundary."""

from xml.etree import ElementTree

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.arc_diagram import arc_diagram
from hpc3d.partition.atom_graph import Atom, Value, contracted
from hpc3d.partition.evaluation import PipelineChoice, StageChoice

SVG = "{http://www.w3.org/2000/svg}"


def drawn(atoms, values, stages):
    graph = contracted(
        [Atom((f"<{number}>",), 0.0, 0.0) for number in range(atoms)],
        [Value(source, targets, nbytes) for source, targets, nbytes in values],
    )
    return ElementTree.fromstring(arc_diagram(graph, PipelineChoice(stages)))


def test_diagram_shows_atoms_values_and_borders():
    values = [(0, (1, 3), 100.0), (1, (2,), 1e6), (2, (3,), 0.0)]
    root = drawn(4, values, (StageChoice(1), StageChoice(3, 2, True), StageChoice(4)))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert texts[:3] == ["stage 0: 1 rank", "stage 1: 2 ranks, recompute", "stage 2: 1 rank"]
    assert texts[3:] == ["<0>", "<1>", "<2>", "<3>"]
    colors = [each.get("fill") for each in root.iter(f"{SVG}circle")]
    assert colors[1] == colors[2] and len({*colors}) == 3
    lines, dots = [*root.iter(f"{SVG}line")], [*root.iter(f"{SVG}circle")]
    for line, (left, right) in zip(lines, ((0, 1), (2, 3)), strict=True):
        assert float(dots[left].get("cx")) < float(line.get("x1")) < float(dots[right].get("cx"))
    widths = [float(each.get("stroke-width")) for each in root.iter(f"{SVG}path")]
    assert len(widths) == 3 and widths[0] == widths[1] < widths[2]


def test_diagram_of_a_large_graph_is_rejected():
    with pytest.raises(ValueError, match="301 atoms, but at most 300"):
        drawn(301, [], (StageChoice(301),))
