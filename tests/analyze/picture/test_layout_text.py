"""The text form lists the layers and the blocks of `Parameters` on a mesh with communicators."""

import re
from collections import defaultdict
from functools import cache
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpc3d.analyze.picture.layout_text import in_ranges, lines
from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.threads import meshes
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve, violated
from hpc3d.model.parameters import Parameters
from hpc3d.model.stage import build
from hpc3d.pipeline.program import program_of
from hpc3d.tensor.split import SCHEMES
from hpc3d.training.trainer import parts_of, spec_of
from tests.analyze.picture.layouts import SHIPPED, blocks_of
from tests.pipeline.mixes import LARGE, MIXES, config_of

DRAWN = {
    "model.layers": 12,
    "model.hidden": 144,
    "model.heads": 36,
    "model.sequence": 72,
    "model.vocabulary": 300,
    "train.batch": 288,
    "parallel.microbatches": 2,
}


def meshes_of(config):
    """Return the meshes of all ranks: with communicators of threads, or abstract if many."""
    grid = config.grid()
    if grid.size <= 64:
        return meshes(config.sizes())[0]
    return [abstract_mesh(config.sizes(), grid.coords(rank)) for rank in range(grid.size)]


def trained(config, mesh):
    """Return the layer ranges of a rank and its parameters, as a run builds them."""
    parameters = Parameters(mesh, config.train.dtype, config.parallel.zero)
    parts, peer = parts_of(mesh, config, program_of(config).placement)
    build(mesh, parameters, spec_of(config, config.model.vocabulary), parts, peer)
    return parts, {each.name: each for each in parameters}


@cache
def shipped(name):
    """Return the blocks of a shipped input, and its text form."""
    blocks = blocks_of(*SHIPPED[name])
    return blocks, [*lines(blocks)]


def numbers(text):
    """Return the numbers of a text such as "0 2-4"."""
    found = []
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found += range(int(first), int(last or first) + 1)
    return found


def rank_rows(text):
    """Return {rank: (coordinates, stored parameters, layers)} of the text form."""
    found = {}
    for row in text:
        if match := re.fullmatch(r" *(\d+)((?:  +\d+)*)  +([\d,]+)  ([a-z].*)", row):
            rank, places, stored, layers = match.groups()
            count = int(stored.replace(",", ""))
            found[int(rank)] = (tuple(map(int, places.split())), count, layers)
    return found


def block_rows(text):
    """Return {rank: block} of the list of blocks of the text form."""
    found = defaultdict(list)
    for row in text:
        if match := re.fullmatch(r" *(\d+:\d+(?:  +\d+:\d+)*)  ([\d -]+)", row):
            bounds = tuple(tuple(map(int, each.split(":"))) for each in match[1].split())
            for rank in numbers(match[2]):
                found[rank].append(bounds)
    return found


def names(parts):
    """Return the layers of a rank: embedding and head, and the numbers of the layers."""
    words = ["embedding"] * any(part.first for part in parts)
    words += ["head"] * any(part.last for part in parts)
    return {*words, *(layer for part in parts for layer in part.layers)}


def listed(layers):
    return {*re.findall("embedding|head", layers), *numbers(layers)}


@pytest.mark.parametrize("name", SHIPPED)
def test_text_lists_the_layers_and_slices_of_training(name):
    compare(*shipped(name))


@pytest.mark.parametrize("line", [*MIXES, *LARGE])
def test_text_of_every_mix_lists_the_layers_and_slices_of_training(line):
    blocks = RankBlocks(config_of(line))
    compare(blocks, [*lines(blocks)])


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_text_of_a_drawn_layout_lists_the_layers_and_slices_of_training(data):
    scheme = data.draw(st.sampled_from([*SCHEMES]), "scheme")
    split = SCHEMES[scheme]
    usable = [*"pdce", *f"{split.m} {split.n} {split.k}".split()]
    axes = data.draw(st.lists(st.sampled_from(usable), max_size=4, unique=True), "axes")
    keys = {f"mesh.{axis}": data.draw(st.sampled_from([2, 3, 4]), axis) for axis in axes}
    keys |= {"mesh.x": keys.get("mesh.x", 1), "parallel.scheme": scheme}
    keys["parallel.zero"] = data.draw(st.sampled_from([0, 1, 2, 3]), "zero")
    experts = {"model.experts": 12} if "e" in axes else {}
    pairs = (keys | DRAWN | experts).items()
    words = [str(word) for key, value in pairs for word in (f"--{key}", value)]
    config = load(None, words)
    ranks = config.grid().size
    assume(ranks <= 64 and not violated(config, ranks))
    blocks = RankBlocks(resolve(config, ranks))
    compare(blocks, [*lines(blocks)])


def compare(blocks, text):
    """Compare the text form with the layer ranges and the parameters of each rank."""
    config, item = blocks.config, blocks.matrix()
    ranks, owned = rank_rows(text), block_rows(text)
    assert [*ranks] == [*dict.fromkeys(rank for row in blocks.rows for rank in row.ranks)]
    everyone = meshes_of(config)
    for rank in {*ranks, *owned}:
        mesh = everyone[rank]
        parts, parameters = trained(config, mesh)
        if rank in ranks:
            places, stored, layers = ranks[rank]
            assert places == tuple(mesh.coord(axis) for axis in blocks.axes)
            assert listed(layers) == names(parts)
            shapes = [each.layout.slices(each.shape, mesh) for each in parameters.values()]
            assert stored == sum(prod(s.stop - s.start for s in shape) for shape in shapes)
        if rank in owned:
            block = parameters[item.name].layout.slices(item.shape, mesh)
            assert owned[rank] == [tuple((each.start, each.stop) for each in block)]


@pytest.mark.parametrize("name", SHIPPED)
def test_listed_blocks_cover_every_element_equally_often(name):
    blocks, text = shipped(name)
    item, owned = blocks.matrix(), block_rows(text)
    bounds = zip(*(rows[0] for rows in owned.values()))
    edges = [sorted({edge for pair in pairs for edge in pair}) for pairs in bounds]
    assert [each[-1] for each in edges] == [*item.shape]
    count = np.zeros([len(each) - 1 for each in edges], int)
    for ((*block,),) in owned.values():
        where = [slice(*map(edge.index, bounds)) for edge, bounds in zip(edges, block)]
        count[tuple(where)] += 1
    one = 1 if blocks.grid.size > 64 else prod(blocks.grid.sizes[a] for a in blocks.copied(item))
    assert (count == one).all()


def test_scheme_with_owners_lists_the_block_of_each_owner_once():
    blocks = blocks_of("gpt-3d-8", "--parallel.scheme", "3d-broadcast")
    assert block_rows(lines(blocks)) == {
        0: [((0, 192), (0, 768))],
        2: [((0, 192), (768, 1536))],
        5: [((192, 384), (0, 768))],
        7: [((192, 384), (768, 1536))],
    }


def test_pipeline_chunks_are_listed_on_their_stage():
    keys = "--mesh.p 2 --model.layers 8 --parallel.microbatches 2 --train.batch 8"
    chunks = "--parallel.schedule interleaved --parallel.chunks 2"
    ranks = rank_rows(lines(blocks_of("gpt-serial", *f"{keys} {chunks}".split())))
    assert ranks[0][2] == "embedding, layers 0-1, layers 4-5"
    assert ranks[1][2] == "layers 2-3, layers 6-7, head"


def test_hosts_are_separated_by_dashed_lines():
    text = [*lines(blocks_of("gpt-3d-8", hosts=[0, 0, 0, 0, 1, 1, 1, 1]))]
    place = text.index("- - - - host 1 - - - -")
    assert text[place - 1].split()[0] == "3" and text[place + 1].split()[0] == "4"
    assert sum("host" in row for row in text) == 1


def test_runs_of_numbers_are_joined():
    assert in_ranges([0, 1, 2, 4, 5, 9]) == "0-2 4 5 9"


def test_only_64_of_more_blocks_are_listed():
    keys = "--mesh.e 64 --mesh.x 2 --train.batch 128"
    blocks = blocks_of("switch-c", *keys.split())
    text = [*lines(blocks)]
    assert len(block_rows(text)) == 64
    assert text[-1] == "first 64 of 128 ranks that store different blocks"
