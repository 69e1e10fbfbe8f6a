"""Boxes show the blocks of `Parameters`, and dashed lines separate devices and hosts."""

import re

import pytest

from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.analyze.picture.rank_boxes import WIDTH, drawing, fractions
from hpc3d.analyze.report.palette import LAYERS
from hpc3d.comm.threads import meshes
from hpc3d.model.parameters import Parameter
from hpc3d.tensor.layout import Layout
from tests.analyze.picture.layouts import blocks_of

NUMBERS = " ".join(rf'{key}="([\d.]+)"' for key in ("x", "y", "width", "height"))
RECT = re.compile(rf'<rect {NUMBERS}( class="all")? fill="(#\w+)"/>')


def of_shape(*shape):
    return Parameter("a", shape, Layout(*[""] * len(shape)))


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((8,), ((2, 4),), [((0.25, 0), (0.5, 1))]),
        ((4, 8), ((1, 2), (4, 8)), [((0.5, 0.25), (1, 0.5))]),
        ((4, 8), ((2, 2), (0, 8)), []),  # stored by another rank
        ((4, 2, 8), ((0, 4), (1, 2), (0, 8)), [((0.5, 0), (1, 1))]),
        (
            (4, 2, 8),
            ((0, 2), (0, 2), (0, 4)),
            [((0, 0), (0.25, 0.5)), ((0.5, 0), (0.75, 0.5))],
        ),
    ],
)
def test_block_covers_its_fraction_of_the_matrix(shape, block, expected):
    assert fractions(of_shape(*shape), block) == expected


def test_filled_parts_are_the_slices_of_each_rank():
    blocks = blocks_of("gpt-3d-8")
    item = blocks.matrix("layers.1.up.weight")
    boxes = "".join(drawing(blocks, (0, 0), LAYERS)[0])
    filled, full = {}, {}
    for *place, is_full, color in RECT.findall(boxes):
        if color == LAYERS[1]:
            x, y, width, height = map(float, place)
            (full if is_full else filled)[int(x // WIDTH)] = (x, y, width, height)
    assert len(filled) == len(full) == 8
    for mesh in meshes(blocks.config.sizes())[0]:
        rows, columns = item.layout.slices(item.shape, mesh)
        x, y, width, height = full[mesh.rank]
        expected = (
            x + width * columns.start / item.shape[1],
            y + height * rows.start / item.shape[0],
            width * (columns.stop - columns.start) / item.shape[1],
            height * (rows.stop - rows.start) / item.shape[0],
        )
        assert filled[mesh.rank] == pytest.approx(expected, abs=0.01)


def styles(blocks):
    return re.findall(r'<line [^>]*class="(\w+)"', "".join(drawing(blocks, (0, 0), LAYERS)[0]))


def test_wide_lines_separate_hosts():
    """Between 16 ranks in rows of eight are 14 vertical and 8 horizontal lines."""
    assert styles(blocks_of("long-context-16")) == ["device"] * 22
    found = styles(blocks_of("long-context-16", hosts=[rank // 4 for rank in range(16)]))
    assert found.count("host") == 2 + 8  # in the middle of each row, and between the rows


def test_many_layers_are_drawn_as_model_chunks():
    keys = "--model.layers 24 --mesh.p 2 --parallel.microbatches 2"
    blocks = blocks_of("gpt-serial", *keys.split())
    boxes = "".join(drawing(blocks, (0, 0), LAYERS)[0])
    assert re.findall(r">([a-z]+|\d+-\d+)</text>", boxes) == ["emb", "0-11", "12-23", "head"]
    assert LAYERS[0] in boxes and LAYERS[1] in boxes


def test_each_layer_has_its_color():
    boxes = "".join(drawing(RankBlocks(blocks_of("gpt-pp-vs-dp").config), (0, 0), LAYERS)[0])
    colors = [color for *_, is_full, color in RECT.findall(boxes) if is_full and color in LAYERS]
    assert colors == [LAYERS[layer % len(LAYERS)] for layer in range(8)]
