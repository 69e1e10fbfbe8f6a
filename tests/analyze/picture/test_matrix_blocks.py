"""Blocks of a matrix, and the ranks of the cube that store them, have equal colors."""

import re
from math import prod

import pytest

from hpc3d.analyze.picture.matrix_blocks import drawing
from tests.analyze.picture.layouts import blocks_of

MATRIX = re.compile(r'<rect [^>]*class="cell" fill="([^"]+)"/>\n<text [^>]*>([^<]+)<')
CUBE = re.compile(r'<polygon [^>]*fill="([^"]+)"/>\n<text [^>]*>(\d+)<')


def drawn(blocks, name=None):
    return "\n".join(drawing(blocks, blocks.matrix(name), (0, 0))[0])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("gpt-3d-64", ""),
        ("gpt-3d-12", ""),
        ("gpt-3d-8", "--parallel.scheme 2.5d"),
        ("gpt-3d-8", "--parallel.scheme 3d-broadcast"),
        ("gpt-serial", "--mesh.d 4 --parallel.zero 3"),
    ],
)
def test_rank_of_the_cube_has_the_color_of_its_block(name, keys):
    blocks = blocks_of(name, *keys.split())
    text = drawn(blocks)
    colors = {}
    for color, names in MATRIX.findall(text):
        for first, last in re.findall(r"(\d+)(?:-(\d+))?", names):
            colors |= dict.fromkeys(range(int(first), int(last or first) + 1), color)
    cube = {int(rank): color for color, rank in CUBE.findall(text)}
    assert [*cube] == [*range(blocks.grid.size)]
    assert {rank: color for rank, color in cube.items() if color != "none"} == colors
    count = prod(blocks.grid.sizes[axis] for axis in blocks.spanned(blocks.matrix()))
    owned = blocks.matrix().layout.owned
    assert len({*colors.values()}) == count / prod(blocks.grid.sizes[axis] for axis in owned)


def test_planes_name_the_coordinates_of_each_rank():
    text = drawn(blocks_of("gpt-3d-8"))
    assert re.findall(r'class="small bold">([^<]+)', text) == ["x0", "x1"]
    assert re.findall(r'class="small end soft">([^<]+)', text) == ["y0", "y1"] * 2
    assert re.findall(r'class="small middle soft">([^<]+)', text) == ["z0", "z1"] * 2


def test_replicated_matrix_names_the_axes():
    assert "replicated along c<" in drawn(blocks_of("long-context-16"))


def test_cube_of_a_long_axis_has_rows_of_eight_ranks():
    text = drawn(blocks_of("gpt-1d-64"))
    rows = [f"x{first}" for first in range(0, 64, 8)]
    assert re.findall(r'class="small end soft">([^<]+)', text) == rows
    assert [int(rank) for _, rank in CUBE.findall(text)] == [*range(64)]
