"""All splits over a few axes: each one is valid and correct, or rejected."""

import re
from dataclasses import replace
from itertools import combinations, permutations, product

import pytest

from hpc3d.comm.threads import run
from hpc3d.tensor.matmul import sharded_matmul
from hpc3d.tensor.split import Split
from tests.elided import elided
from tests.tensor.test_matmul import compare

slow = pytest.mark.slow


def lists(axes):
    """Return some of the axes in any order, as text."""
    some = (each for count in range(len(axes) + 1) for each in combinations(axes, count))
    return [" ".join(order) for each in some for order in permutations(each)]


def on_loops(axes):
    """Return m, n and k, with each axis on one of them, in any order."""
    for order in permutations(axes):
        for letters in product("mnk", repeat=len(axes)):
            found = {letter: [] for letter in "mnk"}
            for axis, letter in zip(order, letters, strict=True):
                found[letter].append(axis)
            yield {letter: " ".join(found[letter]) for letter in "mnk"}


def there_are(axes):
    """Return all splits of the axes. Each axis is on a loop; its blocks are sharded, replicated or
    owned, or in panels if it is the only axis on n and no axis is on k."""
    for loops in on_loops(axes):
        ways = [
            [
                "",
                "replicate",
                "own",
                *(["panels"] if loops["n"] == axis and not loops["k"] else []),
            ]
            for axis in axes
        ]
        for chosen in product(*ways):
            stored = {key: [] for key in ("replicate", "own", "panels")}
            for axis, way in zip(axes, chosen, strict=True):
                if way:
                    stored[way].append(axis)
            yield Split(**loops, **{key: " ".join(found) for key, found in stored.items()})


def in_order(split):
    """Sort the axes of a storage in a split alphabetically, as their order is irrelevant."""
    stored = (split.replicate, split.own, split.panels)
    return (split.m, split.n, split.k, *(" ".join(sorted(axes.split())) for axes in stored))


def test_valid_splits_of_two_axes_are_enumerated():
    keys, found = ("m", "n", "k", "replicate", "own", "panels"), set()
    for values in product(lists("xy"), repeat=6):
        try:
            found.add(in_order(Split(**dict(zip(keys, values, strict=True)))))
        except ValueError as error:
            lines = str(error).splitlines()
            assert all(line.startswith("parallel.split") and len(line) < 160 for line in lines)
    expected = {in_order(split) for axes in ("", "x", "y", "xy") for split in there_are(axes)}
    assert found == expected and len(found) == 1 + 2 * 10 + 114


@pytest.mark.slow
@pytest.mark.parametrize("zero", [None, *(pytest.param(zero, marks=slow) for zero in (0, 2, 3))])
def test_every_valid_split_computes_the_product(zero):
    """Sizes 2 and 3 distinguish two axes of the same loop. A dW whose owner differs from that of W
    is omitted."""
    found = {in_order(split): split for split in there_are("xy")}.values()
    if zero == 2:
        found = [split for split in found if not {*split.own.split()} & {*split.m.split()}]
    if zero is not None:
        found = [replace(split.over("d", zero), defer="") for split in found]

    def rank(mesh):
        mesh.splits = found
        compare(mesh, integers=True, keeps=["xw"])

    run({"d": 1 if zero is None else 2, "x": 2, "y": 3}, rank)


@pytest.mark.parametrize(
    ("letters", "line"),
    [
        ({"n": "y", "own": "y", "panels": "y"}, "parallel.split: axis y ... own ... panels;"),
        ({"m": "x", "n": "y", "panels": "x"}, "parallel.split.panels = x: ... axis,"),
        (
            {"m": "x y", "panels": "y x"},
            "parallel.split.panels = y x: ... axis,",
        ),
        ({"n": "y x", "panels": "y"}, "parallel.split.panels = y: ... axis,"),
        ({"n": "y", "k": "x", "panels": "y"}, "parallel.split.panels = y: ... axis,"),
        ({"m": "x x"}, "parallel.split: axis x occurs more than once ...;"),
        ({"m": "x", "own": "x x"}, "parallel.split: axis x ... own ... own;"),
        ({"replicate": "x"}, "parallel.split.replicate: axis x ... m, n or k; add"),
        (
            {"m": "x", "replicate": "x", "own": "x"},
            "parallel.split: axis x ... replicate ... own",
        ),
    ],
)
def test_invalid_split_is_rejected_in_one_line(letters, line):
    with pytest.raises(ValueError) as refused:
        Split(**letters)
    (said,) = str(refused.value).splitlines()
    assert re.match(elided(line), said)


def test_transposed_weight_cannot_have_panels():
    split = Split(m="x", n="y", panels="y")
    with pytest.raises(ValueError, match="panels"):
        run({"x": 2, "y": 2}, lambda mesh: sharded_matmul(mesh, split, transposed=True))
