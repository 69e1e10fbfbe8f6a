"""Table of the CUDA kernels in `kernels/*.cu`: names, parameters and launch configurations.

The kernels' names, parameters, maximum number of threads per block and mapping of work to the grid
are parsed from their source files. No GPU is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FOLDER = Path(__file__).parent / "kernels"
REALS = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16"}  # dtype -> C++ type
# Additional NVRTC options. The second one allows lambdas without a __device__ qualifier.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")
_LOAD = 16  # bytes per vectorized load of a thread (`pack` elements)
WARP = 32
ROWS_PER_STRIP, STRIPS = 64, 128  # column sums: minimum rows per strip, maximum number of strips
BLOCKS = 2048  # maximum number of blocks of a grid-stride launch

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
    """Launch configuration: blocks per grid and threads per block, each as (x, y).

    No kernel uses dynamic shared memory. If a launch uses one block per row, the grid of an
    array without rows is empty. CUDA does not allow empty grids, so the caller must skip such a
    launch.
    """

    grid: tuple[int, int]
    block: tuple[int, int]


def whole(size: int, part: int) -> int:
    """Return ceil(size / part), but at least 1."""
    return max(1, -(-size // part))


def strips(rows: int) -> int:
    """Return the number of row strips into which a sum over `rows` rows is split."""
    return min(STRIPS, whole(rows, ROWS_PER_STRIP))


def block_per_row(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Use one block per row and one thread per `pack` elements, rounded up to full warps."""
    return Launch((rows, 1), (min(most, WARP * whole(columns, WARP * pack)), 1))


def row_of(elements: int) -> Callable[[int, int, int, int], Launch]:
    """Return a launch function with one block per row and one thread per `elements` elements."""
    return lambda rows, columns, pack, most: block_per_row(rows, columns, elements, most)


def strided(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Cover an array with a grid-stride loop; each thread loads `pack` elements at a time."""
    return Launch((min(BLOCKS, whole(rows * columns, pack * most)), 1), (most, 1))


def thread_per_row(rows: int, columns: int, pack: int, most: int) -> Launch:
    return Launch((whole(rows, most), 1), (most, 1))


def one_block(rows: int, columns: int, pack: int, most: int) -> Launch:
    return Launch((1, 1), (min(most, WARP * whole(rows * columns, WARP)), 1))


def tiles_of_strips(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Assign each block a strip of rows and 32 * `pack` columns."""
    return Launch((whole(columns, WARP * pack), strips(rows)), (WARP, most // WARP))


def tiles_of_columns(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Assign each block 32 columns of one row of sums; `rows` is the number of these rows."""
    return Launch((whole(columns, WARP), rows), (WARP, most // WARP))


def row_by_tiles(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Assign each block 32 * `pack` columns of one row."""
    return Launch((rows, whole(columns, WARP * pack)), (most, 1))


def tiles_of_queries(rows: int, columns: int, pack: int, most: int) -> Launch:
    """Assign each block 8 * `pack` columns of one matrix; `rows` is the number of matrices."""
    return Launch((rows, whole(columns, 8 * pack)), (8, most // 8))


SHAPES = {
    shape.__name__: shape
    for shape in (
        *(block_per_row, strided, thread_per_row, one_block, tiles_of_strips, tiles_of_columns),
        *(row_by_tiles, tiles_of_queries),
    )
}

# The comment before a kernel names its launch function: a key of SHAPES, or `row_of` and a number.
# The launch function maps the work size (rows, columns) to a launch configuration.
# `rows` is 1 for flat arrays, and the number of result rows for kernels such as sum_repeated.
# For sum_strips, `rows` is the number of sums (1 or 2).
# For attention, `rows` is the number of matrices (B heads), each with T columns.
# The comment also lists the arrays that the kernel both reads and writes.
# Arrays that are not listed are either only read or only written.
_DECLARATION = re.compile(
    r"// Launch: (\w+)(?: (\d+))?(?:; reads and writes ([\w, ]+))?\n"
    r"(template <typename T>\s)?__global__ void __launch_bounds__\((\d+)(?:, \d+)?\)\s+"
    r"(\w+)\(([^)]*)\)"
)


class Kernel(NamedTuple):
    """Declaration of one kernel.

    `parameters` maps names to C++ types, where T is the template parameter. `updated` lists the
    arrays that the kernel reads before it writes them.
    """

    name: str
    source: str
    shape: Callable
    updated: list[str]
    template: bool
    threads: int
    parameters: dict[str, str]

    @property
    def instances(self) -> list[str]:
        """C++ names of all instances of the kernel, one for each template argument T."""
        return [self.expression(real) for real in REALS] if self.template else [self.name]

    def expression(self, real: str | None) -> str:
        """Return the C++ name of the kernel, or of a template's instantiation for dtype `real`."""
        return f"{self.name}<{REALS[real]}>" if self.template else self.name

    def launch(self, real: str | None, rows: int, columns: int) -> Launch:
        """Return the grid and block sizes for work on `rows` x `columns` elements."""
        pack = _LOAD // (2 if real in ("float16", "bfloat16") else 4)
        return self.shape(rows, columns, pack, self.threads)

    def bind(
        self, dtype_of: Callable[[Any], str], given: Mapping[str, Any]
    ) -> tuple[str | None, list[Any]]:
        """Return the dtype of the template parameter T, and the arguments in parameter order.

        Numbers become NumPy scalars of the parameter's type; arrays and `None` (a null pointer)
        are unchanged. `dtype_of(array)` returns the name of an array's dtype. An assertion fails
        if an array's dtype differs from the parameter's, because the kernel would read garbage, or
        if a name is missing or unknown.
        """
        assert given.keys() == self.parameters.keys(), f"{self.name}: {[*given]}"
        pointers = [n for n, kind in self.parameters.items() if kind in ("T*", "const T*")]
        reals = {dtype_of(given[n]) for n in pointers if given[n] is not None}
        real = reals.pop() if self.template else None
        assert not reals, f"{self.name}: arrays of type T have different dtypes"
        assert real in REALS or not self.template, f"{self.name}: T is {real}"
        for name, value in given.items():
            wanted = self.pointee(name, real)
            fits = not wanted or value is None or dtype_of(value) == wanted
            assert fits, f"{self.name}: {name} must be {wanted}"
        return real, [self.typed(name, given[name]) for name in self.parameters]

    def pointee(self, name: str, real: str | None) -> str | None:
        """Return the element dtype of a pointer parameter, or `None` for a scalar parameter."""
        kind, star, _ = self.parameters[name].removeprefix("const ").partition("*")
        return {**_POINTEES, "T": real}[kind] if star else None

    def typed(self, name: str, value: Any) -> Any:
        kind = self.parameters[name]
        return value if kind.endswith("*") else _SCALARS[kind](value)


def text(source: str) -> str:
    """Return the contents of a CUDA C++ source file; its headers are in FOLDER."""
    return (FOLDER / f"{source}.cu").read_text(encoding="utf-8")


def sources() -> list[str]:
    """Return the names of all kernel source files."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


@cache
def kernels() -> dict[str, Kernel]:
    """Return a dict that maps kernel names to the declarations parsed from the source file."""
    found = {}
    for source in sources():
        declared = _DECLARATION.findall(text(source))
        for shape, elements, updated, template, threads, name, listed in declared:
            how = row_of(int(elements)) if shape == "row_of" else SHAPES[shape]
            parameters = dict(map(parameter, listed.split(",")))
            names = updated.split(", ") if updated else []
            found[name] = Kernel(
                name, source, how, names, bool(template), int(threads), parameters
            )
    return found


def parameter(declared: str) -> tuple[str, str]:
    """Return the name and type of a parameter, parsed from a declaration such as `const T* x`."""
    kind, _, name = " ".join(declared.split()).rpartition(" ")
    return name, kind
