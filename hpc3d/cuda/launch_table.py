"""The CUDA kernels of `kernels/*.cu` as data: what they are called, take, and are launched with.

Names, parameters, the most threads of a block and how a grid covers the work are read from the
text of the kernels.  Nothing here needs a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "kernels"
REALS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}  # T, by dtype
# NVRTC's, besides the architecture and FOLDER among the folders of headers: lambdas have no
# __device__ in front of them.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
_LOAD = 16  # bytes that a thread loads at once
WARP = 32
ROWS_PER_STRIP, STRIPS = 64, 128  # of the first pass of a sum over rows, at least and at most
BLOCKS = 2048  # of a grid that strides

_SCALARS = {
    "int": np.int32,
    "unsigned": np.uint32,
    "long long": np.int64,
    "float": np.float32,
    "double": np.float64,
}
_POINTEES = {
    "float": "float32",
    "double": "float64",
    "long long": "int64",
    "Word": "uint64",
    "bool": "bool",
    "unsigned char": "uint8",
    "signed char": "int8",
}


class Launch(NamedTuple):
    """Blocks of a grid and threads of a block, each (x, y); no kernel takes dynamic memory.

    A grid of one row per block has none where there are no rows: CUDA wants no launch then.
    """

    grid: tuple[int, int]
    block: tuple[int, int]


def whole(size: int, part: int) -> int:
    """How many parts cover `size`, at least one."""
    return max(1, -(-size // part))


def strips(rows: int) -> int:
    """The partial sums that the first pass of a sum over `rows` rows leaves to sum_strips."""
    return min(STRIPS, whole(rows, ROWS_PER_STRIP))


def block_per_row(rows: int, columns: int, pack: int, most: int) -> Launch:
    """As many threads as a row has packs, in whole warps."""
    return Launch((rows, 1), (min(most, WARP * whole(columns, WARP * pack)), 1))


def row_of(elements: int) -> Callable[[int, int, int, int], Launch]:
    """One row per block, where a thread has so many elements of any type."""
    return lambda rows, columns, pack, most: block_per_row(rows, columns, elements, most)


def strided(rows: int, columns: int, pack: int, most: int) -> Launch:
    """All elements, as many times as it takes."""
    return Launch((min(BLOCKS, whole(rows * columns, pack * most)), 1), (most, 1))


def thread_per_row(rows: int, columns: int, pack: int, most: int) -> Launch:
    return Launch((whole(rows, most), 1), (most, 1))


def one_block(rows: int, columns: int, pack: int, most: int) -> Launch:
    return Launch((1, 1), (min(most, WARP * whole(rows * columns, WARP)), 1))


def tiles_of_strips(rows: int, columns: int, pack: int, most: int) -> Launch:
    """32 packs of columns by a strip of rows."""
    return Launch((whole(columns, WARP * pack), strips(rows)), (WARP, most // WARP))


def tiles_of_columns(rows: int, columns: int, pack: int, most: int) -> Launch:
    """32 columns of a sum."""
    return Launch((whole(columns, WARP), rows), (WARP, most // WARP))


def row_by_tiles(rows: int, columns: int, pack: int, most: int) -> Launch:
    """A row by 32 packs of columns."""
    return Launch((rows, whole(columns, WARP * pack)), (most, 1))


def tiles_of_queries(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Of `rows` matrices 8 packs of their `columns` columns."""
    return Launch((rows, whole(columns, 8 * pack)), (8, most // 8))


SHAPES = {
    shape.__name__: shape
    for shape in (
        *(block_per_row, strided, thread_per_row, one_block, tiles_of_strips, tiles_of_columns),
        *(row_by_tiles, tiles_of_queries),
    )
}

# Before each kernel stands how (rows, columns) of the work become a launch: a name of SHAPES, or
# `row_of` a number of elements.  Of flat arrays rows is 1; of sum_repeated and its like it is the
# rows of the result; of sum_strips, one or two sums; of attention, B heads matrices of T columns.
# The arrays that it reads before it writes them follow; of others all are one or the other.
_DECLARATION = re.compile(
    r"// Launch: (\w+)(?: (\d+))?(?:; reads and writes ([\w, ]+))?\n"
    r"(template <typename T>\s)?__global__ void __launch_bounds__\((\d+)(?:, \d+)?\)\s+"
    r"(\w+)\(([^)]*)\)"
)


class Kernel(NamedTuple):
    """One kernel; `parameters` by name with their C++ types, T that of the template; `updated` are
    those that it reads before it writes them."""

    name: str
    source: str
    shape: Callable
    updated: list[str]
    template: bool
    threads: int
    parameters: dict[str, str]

    @property
    def instances(self) -> list[str]:
        """What to compile: the name, for each type that T may be."""
        return [self.expression(real) for real in REALS] if self.template else [self.name]

    def expression(self, real: str | None) -> str:
        """The name in C++ where T is the dtype named `real`."""
        return f"{self.name}<{REALS[real]}>" if self.template else self.name

    def launch(self, real: str | None, rows: int, columns: int) -> Launch:
        """The grid and the block for work of that size."""
        pack = _LOAD // (2 if real in ("float16", "bfloat16") else 4)
        return self.shape(rows, columns, pack, self.threads)

    def bind(
        self, dtype_of: Callable[[Any], str], given: Mapping[str, Any]
    ) -> tuple[str | None, list[Any]]:
        """The dtype of T and the values in the order of the parameters: numbers as NumPy scalars
        of the parameter's type, arrays and None (null) as they are.

        `dtype_of(array)` is the name of an array's dtype.  An array of another dtype than the
        parameter's would be read as garbage: it is an error, as is a missing or unknown name.
        """
        assert given.keys() == self.parameters.keys(), f"{self.name}: {[*given]}"
        reals = {dtype_of(given[n]) for n in self.pointers("T") if given[n] is not None}
        real = reals.pop() if self.template else None
        assert not reals, f"{self.name}: arrays of several types are T"
        assert real in REALS or not self.template, f"{self.name}: T is {real}"
        for name, value in given.items():
            wanted = self.pointee(name, real)
            fits = not wanted or value is None or dtype_of(value) == wanted
            assert fits, f"{self.name}: {name} must be {wanted}"
        return real, [self.typed(name, given[name]) for name in self.parameters]

    def pointers(self, to: str) -> list[str]:
        return [n for n, kind in self.parameters.items() if kind in (f"{to}*", f"const {to}*")]

    def pointee(self, name: str, real: str | None) -> str | None:
        """The dtype that a pointer points to, None of a number."""
        kind, star, _ = self.parameters[name].removeprefix("const ").partition("*")
        return {**_POINTEES, "T": real}[kind] if star else None

    def typed(self, name: str, value: Any) -> Any:
        kind = self.parameters[name]
        return value if kind.endswith("*") else _SCALARS[kind](value)


def text(source: str) -> str:
    """The CUDA C++ of a source; it includes files of FOLDER."""
    return (FOLDER / f"{source}.cu").read_text(encoding="utf-8")


def sources() -> list[str]:
    """The names of all files of kernels."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@cache
def kernels() -> dict[str, Kernel]:
    """All kernels by name, as their texts declare them."""
    found = {}
    for source in sources():
        for shape, elements, updated, template, threads, name, listed in _declared(source):
            how = row_of(int(elements)) if shape == "row_of" else SHAPES[shape]
            parameters = dict(map(parameter, listed.split(",")))
            names = updated.split(", ") if updated else []
            found[name] = Kernel(
                name, source, how, names, bool(template), int(threads), parameters
            )
    return found


def _declared(source: str) -> list[tuple[str, ...]]:
    return _DECLARATION.findall(text(source))


def parameter(declared: str) -> tuple[str, str]:
    """Name and type of one parameter, as `const T* x`."""
    kind, _, name = " ".join(declared.split()).rpartition(" ")
    return name, kind
