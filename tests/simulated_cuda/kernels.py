"""Launches of kernels: those of hpc3d run in the emulator, and the few of CuPy in NumPy.

A compiled image is identified by its bytes. When NVRTC compiles an image, its source code is noted
in a file, because CuPy caches images on disk.
"""

import ctypes
import json
import re
import threading
from functools import cache, partial
from hashlib import sha256
from pathlib import Path

import ml_dtypes
import numpy as np

from hpc3d.cuda import launch_table
from tests.cuda import emulator
from tests.simulated_cuda.device import memory, refuse

FOLDER = Path(__file__).parents[2] / ".pytest_cache" / "d" / "simulated_cuda"
EMULATING = threading.Lock()  # the emulator is one machine
TYPES = {
    "float": np.float32,
    "double": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "bool": np.bool_,
    "signed char": np.int8,
    "unsigned char": np.uint8,
    "short": np.int16,
    "unsigned short": np.uint16,
    "int": np.int32,
    "unsigned int": np.uint32,
    "long long": np.int64,
    "unsigned long long": np.uint64,
}
PARAMETER = re.compile(
    r"(?:const )?"
    r"(?P<kind>CArray<(?P<type>[\w ]+), (?P<dims>\d+), \d, \d>|CIndexer<\d+, \d>|[\w ]+?)"
    r" \w+(?:, |$)"
)


def watch(nvrtc):
    """Record compilations by NVRTC, and the names of the compiled kernels."""
    programs = {}
    make, lower, finish = nvrtc.createProgram, nvrtc.getLoweredName, nvrtc.getCUBIN

    def create(text, *how):
        program = make(text, *how)
        programs[program] = text, {}
        return program

    def lowered(program, expression):
        name = lower(program, expression)
        programs[program][1][name] = expression
        return name

    def image(program):
        made, (text, names) = finish(program), programs[program]
        path = noted(made)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{id(made)}")
        temporary.write_text(json.dumps({"text": text, "names": names}))
        temporary.replace(path)
        return made

    nvrtc.createProgram, nvrtc.getLoweredName, nvrtc.getCUBIN = create, lowered, image


def noted(image):
    return FOLDER / "texts" / f"{sha256(image).hexdigest()}.json"


@cache
def told(image):
    return json.loads(noted(image).read_text())


def launched(image, name, grid, block, parameters):
    """Return (name, function without arguments) of a launch; the arguments are read now."""
    text, names = told(image).values()
    if name in names:
        return names[name], partial(ours, names[name], grid, block, words(names[name], parameters))
    given = arguments(text, name, parameters)
    return name, partial(OWN.get(name, elementwise), name, *given)


# The program's own


@cache
def kernels():
    return {
        name: kernel for kernel in launch_table.kernels().values() for name in kernel.instances
    }


@cache
def library(source):
    instances = [name for name, kernel in kernels().items() if kernel.source == source]
    program = emulator.program(launch_table.text(source), instances)
    FOLDER.mkdir(parents=True, exist_ok=True)
    return emulator.Emulator(emulator.build({source: program}, FOLDER, watched="-O2")).library


def words(name, parameters):
    """Return copies of the arguments, of at most 8 bytes each."""
    count = len(kernels()[name].parameters)
    cells = (ctypes.c_void_p * count).from_address(parameters)
    return [ctypes.create_string_buffer(ctypes.string_at(cell, 8), 8) for cell in cells]


def ours(name, grid, block, held):
    places = {int.from_bytes(word.raw, "little") for word in held}
    blocks = [*filter(None, {memory.around(place) for place in places})]
    with EMULATING:
        error = emulate(name, grid, block, held, blocks)
    refuse(error, f"{name}: {(error or b'').decode()}")


def emulate(name, grid, block, held, blocks):
    kernel = kernels()[name]
    least = 1 if any("char" in kind for kind in kernel.parameters.values()) else 2
    return library(kernel.source).emulate(
        name.encode(),
        (ctypes.c_uint * 2)(*grid[:2]),
        (ctypes.c_uint * 2)(*block[:2]),
        (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held)),
        len(blocks),
        (ctypes.c_char_p * len(blocks))(*(b"memory of the device" for _ in blocks)),
        (ctypes.c_void_p * len(blocks))(*(start for start, _ in blocks)),
        (ctypes.c_size_t * len(blocks))(*(size for _, size in blocks)),
        (ctypes.c_size_t * len(blocks))(*(least for _ in blocks)),
    )


# CuPy's own


def arguments(text, name, parameters):
    """Return arrays, as views, and numbers; indexers are omitted."""
    head = re.search(rf"void {name}\((.*?)\) \{{", text, re.DOTALL)[1]
    kinds = [*PARAMETER.finditer(head)]
    cells = (ctypes.c_void_p * len(kinds)).from_address(parameters)
    pairs = [pair for pair in zip(kinds, cells) if "CIndexer" not in pair[0]["kind"]]
    return [array(kind, cell) if kind["type"] else number(kind, cell) for kind, cell in pairs]


def number(kind, cell):
    dtype = np.dtype(TYPES[kind["kind"].removeprefix("const ")])
    return np.frombuffer(ctypes.string_at(cell, dtype.itemsize), dtype)[0]


def array(kind, cell):
    """Read the struct {T* data; ptrdiff_t size, shape[dims], strides[dims];}."""
    dtype, dims = np.dtype(TYPES[kind["type"]]), int(kind["dims"])
    told = np.frombuffer(ctypes.string_at(cell, 16 * (1 + dims)), np.int64)
    start, size, shape, steps = int(told[0]), told[1], told[2 : 2 + dims], told[2 + dims :]
    if not size:
        return np.empty(shape, dtype)
    extent = dtype.itemsize + int(((shape - 1) * steps).sum())
    held = np.frombuffer((ctypes.c_byte * extent).from_address(start), np.uint8)
    return np.lib.stride_tricks.as_strided(np.ndarray(1, dtype, held), shape, steps)


def elementwise(name, *given):
    *given, out = given
    word = name.removeprefix("cupy_").partition("__")[0]
    value = given[0] if word in ("copy", "fill") else getattr(np, word)(*given)
    out[...] = value.astype(out.dtype)


def total(_, values, out, stride):
    assert out.size == 1, "sums along an axis are not simulated"
    out[...] = values.sum(dtype=out.dtype)


def concatenate(_, addresses, axis, starts, strides, out):
    assert out.ndim == 1
    size = out.itemsize
    for address, start, stop in zip(addresses, starts, [*starts[1:], out.size]):
        part = (ctypes.c_byte * int(size * (stop - start))).from_address(int(address))
        out[start:stop] = np.frombuffer(part, np.uint8).view(out.dtype)


OWN = {"cupy_sum": total, "cupy_concatenate": concatenate}
