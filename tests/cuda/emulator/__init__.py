"""Emulator that runs the CUDA kernels' source code on the host; see cuda.hpp and machine.cpp.

Arrays are NumPy arrays. NumPy has no bfloat16, so bfloat16 arrays are uint16 arrays with the upper
half of each float32 (`to_bfloat16`, `from_bfloat16`).
"""

import ctypes
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from hpc3d.cuda import launch_table

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17 -O1 -fPIC -ffp-contract=off -fno-strict-aliasing -fno-gnu-unique "
    f"-Wall -Wno-unknown-pragmas -Werror -I{HERE} -I{launch_table.FOLDER}"
).split()
WATCHED = "-fsanitize=thread"  # shows accesses to the machine


class Fault(Exception):
    """Kernel error that would be undefined behavior on a GPU."""


def compiler():
    return shutil.which("g++")


def program(text, instances):
    """Return CUDA source text with its instances registered by name."""
    lines = ['#include "cuda.hpp"', text]
    lines += [f'static Registered<{i}> number{n}("{i}");' for n, i in enumerate(instances)]
    return "\n".join(lines)


def build(programs, folder, watched=WATCHED):
    """Return the library of programs {name: text}, compiled unless it is in `folder`. `watched` is
    the compiler flag that enables checks of memory accesses."""
    headers = sorted(path for at in (HERE, launch_table.FOLDER) for path in at.glob("*.*h*"))
    machine = (HERE / "machine.cpp").read_text()
    texts = [*FLAGS, watched, *programs.values(), machine, *(path.read_text() for path in headers)]
    library = folder / f"{sha256(chr(0).join(texts).encode()).hexdigest()}.so"
    if not library.exists():
        with TemporaryDirectory(dir=folder) as place, ThreadPoolExecutor(2) as pool:
            made = [Path(place) / f"{number}.o" for number in range(len(programs) + 1)]
            sources = [*((text, [watched]) for text in programs.values()), (machine, [])]
            list(pool.map(compiled, made, *zip(*sources)))
            whole = Path(place) / library.name
            subprocess.run(["g++", "-shared", *made, "-o", whole], check=True)
            whole.replace(library)
    return library


def compiled(made, text, flags):
    """Compile one source text to the file `made`."""
    command = ["g++", *FLAGS, *flags, "-x", "c++", "-", "-c", "-o", made]
    subprocess.run(command, input=text, text=True, check=True)


class Emulator:
    """Kernels of a library, launched as `launches` describes."""

    def __init__(self, library):
        self.library = ctypes.CDLL(str(library))
        self.library.emulate.restype = ctypes.c_char_p

    def __call__(self, name, rows, columns, /, **given):
        """Launch a kernel for work of this size; raise Fault if it is wrong."""
        kernel = launch_table.kernels()[name]
        real, values = kernel.bind(dtype_of, given)
        launch = kernel.launch(real, rows, columns)
        self.run(kernel.expression(real), launch, dict(zip(kernel.parameters, values)))

    def run(self, expression, launch, values):
        """Launch a registered kernel with arrays, numbers and None by name."""
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        assert all(array.flags.c_contiguous for array in arrays.values())
        held = [in_memory(value) for value in values.values()]
        error = self.library.emulate(
            expression.encode(),
            (ctypes.c_uint * 2)(*launch.grid),
            (ctypes.c_uint * 2)(*launch.block),
            (ctypes.c_void_p * len(held))(*(cell.ctypes.data for cell in held)),
            len(arrays),
            (ctypes.c_char_p * len(arrays))(*(name.encode() for name in arrays)),
            (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays.values())),
            (ctypes.c_size_t * len(arrays))(*(a.nbytes for a in arrays.values())),
            (ctypes.c_size_t * len(arrays))(*(a.itemsize for a in arrays.values())),
        )
        if error:
            raise Fault(f"{expression}: {error.decode()}")


def in_memory(value):
    """Return a 0-d array that holds a number, or the address of an array."""
    if isinstance(value, np.ndarray):
        value = value.ctypes.data
    return np.array(0 if value is None else value, getattr(value, "dtype", np.uint64))


def dtype_of(array):
    return {"uint16": "bfloat16"}.get(array.dtype.name, array.dtype.name)


def to_bfloat16(x):
    """Round float32 to the nearest bfloat16; ties go to the even one."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)
