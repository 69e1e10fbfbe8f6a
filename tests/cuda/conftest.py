"""CUDA kernels on the host, and random inputs for them."""

from typing import NamedTuple

import numpy as np
import pytest

from hpc3d.cuda import launch_table
from tests.cuda import emulator, rules


@pytest.fixture(scope="session")
def library_of(request):
    """Compile and load a library of programs {name: text}, unless it is cached."""
    if emulator.compiler() is None:
        pytest.skip("no g++: the CUDA kernels are not run on the host")
    folder = request.config.cache.mkdir("cuda-emulator")
    return lambda programs: emulator.Emulator(emulator.build(programs, folder))


ELSEWHERE = pytest.StashKey()  # of what launches the kernels where it is not the emulator


@pytest.fixture(scope="session")
def emulate(request):
    """Return a function that launches a kernel, (name, rows, columns, **parameters), on the host
    or with the launcher of tests/gpu/kernels.py."""
    if ELSEWHERE in request.config.stash:
        return request.config.stash[ELSEWHERE]
    library_of = request.getfixturevalue("library_of")
    instances = {source: [] for source in launch_table.sources()}
    for kernel in launch_table.kernels().values():
        instances[kernel.source] += kernel.instances
    texts = {name: launch_table.text(name) for name in instances}
    return library_of({s: emulator.program(texts[s], instances[s]) for s in instances})


@pytest.fixture(scope="module")
def launcher(emulate):
    """Device rules whose kernels run in the emulator."""
    launcher = rules.Launcher(emulate)
    rules.register(launcher)
    return launcher


@pytest.fixture
def counts_from_zero(launcher):
    for counter in (launcher.count, launcher.bytes, launcher.products):
        counter.clear()


class Real(NamedTuple):
    """Number type; `unit` is its maximum relative rounding error."""

    name: str
    dtype: type
    unit: float

    def cast(self, x, offset=0):
        """Return x in this type, `offset` elements after an address divisible by 16."""
        bits = emulator.to_bfloat16(x) if self.name == "bfloat16" else x.astype(self.dtype)
        memory = np.empty(bits.size + 16, self.dtype)
        first = -memory.ctypes.data % 16 // memory.itemsize + offset
        placed = memory[first : first + bits.size].reshape(bits.shape)
        placed[...] = bits
        return placed

    def back(self, x):
        """Convert numbers of this type to float32."""
        wide = emulator.from_bfloat16(x) if self.name == "bfloat16" else x.astype(np.float32)
        return wide.reshape(x.shape)

    def empty(self, *shape, offset=0):
        """Return an array of NaN."""
        return self.cast(np.full(shape, np.nan, np.float32), offset)

    def same(self, got, expected, atol=2e-6):
        """Assert that `got` (of this type) equals `expected` up to rounding."""
        close = 2e-6 if self.name == "float32" else 1.001 * self.unit
        np.testing.assert_allclose(self.back(got), expected, rtol=close, atol=atol)


FLOAT = Real("float32", np.float32, 2**-24)
REALS = [FLOAT, Real("float16", np.float16, 2**-11), Real("bfloat16", np.uint16, 2**-8)]


@pytest.fixture(params=REALS, ids=lambda real: real.name)
def real(request):
    return request.param


@pytest.fixture
def draw():
    """Return normal numbers of a type, and their float32 values."""
    random = np.random.default_rng(7)

    def drawn(real, *shape, offset=0):
        x = real.cast(random.normal(size=shape).astype(np.float32), offset)
        return x, real.back(x)

    return drawn
