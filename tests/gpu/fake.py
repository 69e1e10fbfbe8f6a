"""NumPy instead of a GPU, to test the GPU check itself."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from hpc3d.cuda import launch_table
from hpc3d.ops.gelu import gelu_tanh
from tests.gpu.notes import Skip

# Where the tests of the kernels keep them, too.
LIBRARIES = Path(__file__).parents[2] / ".pytest_cache" / "d" / "cuda-emulator"


class Fake:
    """Slow replacement of device.Gpu, for small sizes."""

    fake = True
    where = "cpu"
    reals = tuple(launch_table.REALS)

    def __init__(self):
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it

        self.ruled = False

    def synchronize(self):
        pass

    def alive(self):
        return True

    def memory(self, nbytes):
        memory = np.empty(nbytes + 16, np.uint8)
        first = -memory.ctypes.data % 16
        return memory[first : first + nbytes]

    def array(self, memory, offset, shape, dtype):
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return memory[offset : offset + nbytes].view(dtype).reshape(shape)

    def write(self, memory, offset, host):
        memory[offset : offset + host.nbytes] = host.reshape(-1).view(np.uint8)

    def read(self, memory, offset, host):
        host.reshape(-1).view(np.uint8)[...] = memory[offset : offset + host.nbytes]

    def upload(self, host):
        from tests.cuda.rules import CudaArray

        return np.array(host).view(CudaArray)

    def download(self, array):
        return np.array(array)

    def cuda(self):
        return SimpleNamespace(number=0, name="fake")

    def pool(self):
        """Return a pool of arrays with device rules, whose kernels run in the emulator."""
        from tests.cuda import rules

        if not self.ruled:
            rules.register(rules.Launcher(self.launch()))
            self.ruled = True

        class HostPool(rules.CudaPool):
            """Pool that supports bfloat16, which NumPy's buffer protocol does not."""

            def empty(self, shape, dtype, kind="activation"):
                stored = np.uint16 if np.dtype(dtype).name == "bfloat16" else dtype
                return super().empty(shape, stored, kind).view(dtype)

        return HostPool()

    def launch(self):
        """Launch a kernel in the emulator of the kernel tests."""
        from tests.cuda import emulator

        if emulator.compiler() is None:
            raise Skip("no g++ for the emulator")
        sources = {source: [] for source in launch_table.sources()}
        for kernel in launch_table.kernels().values():
            sources[kernel.source] += kernel.instances
        texts = {s: emulator.program(launch_table.text(s), sources[s]) for s in sources}
        LIBRARIES.mkdir(parents=True, exist_ok=True)
        return emulator.Emulator(emulator.build(texts, LIBRARIES))

    direct = launch

    def lt(self, tf32=False):
        return SimpleNamespace(product=product)

    def flash(self):
        raise Skip("a fake device has no cuDNN")

    def seconds(self, function, repeats):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start


def product(
    a,
    b,
    out,
    bias=None,
    add=None,
    bias_grad=None,
    gelu_input=None,
    gelu_at=None,
    scale=1.0,
):
    """Compute Lt.product in NumPy."""
    whole = scale * np.matmul(wide(a), wide(b)) + wide(add) + wide(bias)
    if bias_grad is not None:
        np.asarray(bias_grad)[...] = wide(b).sum(0)
    if gelu_input is not None:
        np.asarray(gelu_input)[...] = whole
        whole = gelu(whole)[0]
    np.asarray(out)[...] = whole if gelu_at is None else whole * gelu(wide(gelu_at))[1]


def wide(array):
    """Convert to float64; None becomes 0."""
    return 0.0 if array is None else np.asarray(array).astype(np.float64)


def gelu(x):
    """Return the tanh GELU and its derivative."""
    slope, out = x.copy(), np.empty_like(x)
    gelu_tanh(slope, out)
    return out, slope
