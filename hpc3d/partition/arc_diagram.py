"""Arc diagram of a torch module that is partitioned into pipeline stages.

Atoms are dots on a horizontal line, arcs show the values passed between them, and vertical lines
mark the stage boundaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from xml.sax.saxutils import escape

from hpc3d.console.sanitize import counted
from hpc3d.partition.atom_graph import Graph
from hpc3d.partition.evaluation import PipelineChoice

_STEP, _MARGIN, _LABELS = 22, 40, 170  # spacing of atoms, margin, and height of the labels, in px
_MOST = 300  # maximum number of atoms in a legible diagram
_COLOURS = ("#3b6fb6", "#c8553d", "#4d9078", "#8661a8", "#b98b2f", "#5b6770")


def arc_diagram(graph: Graph, choice: PipelineChoice) -> str:
    """Return an SVG drawing of a graph and its stages.

    The stroke width of an arc grows logarithmically with the size of the value passed. Raises
    ValueError if the graph has too many atoms for a legible diagram.
    """
    if len(graph) > _MOST:
        raise ValueError(
            f"--draw: the graph has {len(graph)} atoms, but at most {_MOST} can be drawn; remove "
            "--draw"
        )
    far = max((max(value.targets) - value.source for value in graph.values), default=1)
    base = _MARGIN + 20 + far * _STEP / 2
    width, height = 3 * _MARGIN + len(graph) * _STEP, base + _LABELS
    lines = [
        *_borders(choice, base),
        *(arc for value in graph.values for arc in _arcs(value, base)),
        *_atoms(graph, choice, base),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}"'
    style = 'font-family="sans-serif" font-size="10"'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {style}>", ground, *lines, "</svg>", ""])


def _x(index):
    return _MARGIN + (index + 0.5) * _STEP


def _borders(choice: PipelineChoice, base: float) -> Iterator[str]:
    """Yield a label for each model chunk, and a dashed line at each boundary between chunks."""
    before = 0
    for part, stage in enumerate(choice.stages):
        right, middle = _x(stage.end - 0.5), (_x(before) + _x(stage.end - 1)) / 2
        ranks = counted(stage.replicas, "rank")
        again = ", recompute" if stage.recompute else ""
        text = f"stage {part % choice.width}: {ranks}{again}"
        yield f'<text x="{middle:.0f}" y="20" text-anchor="middle">{text}</text>'
        if stage is not choice.stages[-1]:
            ends = f'x1="{right:.0f}" x2="{right:.0f}" y1="28" y2="{base + 16:.0f}"'
            yield f'<line {ends} stroke="black" stroke-dasharray="4 3"/>'
        before = stage.end


def _arcs(value, base):
    for target in value.targets if value.nbytes else ():
        left, right = _x(value.source), _x(target)
        radius = (right - left) / 2
        path = f"M {left:.0f} {base:.0f} A {radius:.0f} {radius:.0f} 0 0 1 {right:.0f} {base:.0f}"
        wide = max(0.5, log2(1 + value.nbytes) / 8)
        yield f'<path d="{path}" fill="none" stroke="#9aa5b1" stroke-width="{wide:.1f}"/>'


def _atoms(graph: Graph, choice: PipelineChoice, base: float) -> Iterator[str]:
    ends = [stage.end for stage in choice.stages]
    for index, atom in enumerate(graph.atoms):
        part = sum(end <= index for end in ends)
        color, x = _COLOURS[part % choice.width % len(_COLOURS)], _x(index)
        yield f'<circle cx="{x:.0f}" cy="{base:.0f}" r="5" fill="{color}"/>'
        name, below = escape(str(atom.ids[-1])[-28:]), base + 14
        turn = f'transform="rotate(60 {x:.0f} {below:.0f})"'
        yield f'<text x="{x:.0f}" y="{below:.0f}" {turn}>{name}</text>'
