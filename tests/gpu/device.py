"""The GPU, as used by the parts of the check.

This module contains everything of the program that the check uses on a device.
"""

import ctypes

import numpy as np

from hpc3d.cuda import launch_table
from tests.gpu.notes import Skip

ADDED = "--device-as-default-execution-space"  # by CuPy itself
WORKSPACE = 64 << 20  # bytes of cuBLASLt's


class Gpu:
    """One GPU with CuPy, bound before the first array."""

    fake = False
    where = "cuda"  # torch's name of it
    reals = tuple(launch_table.REALS)

    def __init__(self):
        try:
            import ml_dtypes  # noqa: F401  before CuPy, which then knows bfloat16
        except ImportError:
            self.reals = "float32", "float16"
        try:
            import cupy
        except ImportError as error:
            raise Skip(f"no CuPy: {error}") from None
        if not cupy.cuda.is_available():
            raise Skip(f"CuPy {cupy.__version__} finds no device")
        self.cupy = cupy
        cupy.cuda.Device(0).use()
        self.shared = None

    def synchronize(self):
        self.cupy.cuda.runtime.deviceSynchronize()

    def alive(self):
        """Return True if the device still responds, which it does not do after a fault."""
        try:
            self.synchronize()
            return True
        except Exception:
            return False

    def memory(self, nbytes):
        """Allocate bytes on the device for the lifetime of the result."""
        return self.cupy.cuda.alloc(nbytes)

    def array(self, memory, offset, shape, dtype):
        return self.cupy.ndarray(shape, dtype, memptr=memory + offset)

    def write(self, memory, offset, host):
        if host.nbytes:
            (memory + offset).copy_from_host(ctypes.c_void_p(host.ctypes.data), host.nbytes)

    def read(self, memory, offset, host):
        if host.nbytes:
            (memory + offset).copy_to_host(ctypes.c_void_p(host.ctypes.data), host.nbytes)

    def upload(self, host):
        """Return a contiguous copy on the device, of any type."""
        host = np.ascontiguousarray(host)
        memory = self.memory(max(1, host.nbytes))
        self.write(memory, 0, host)
        self.synchronize()
        return self.array(memory, 0, host.shape, host.dtype)

    def download(self, array):
        self.synchronize()
        array = self.cupy.ascontiguousarray(array)
        self.synchronize()
        host = np.empty(array.shape, array.dtype)
        self.read(array.data, 0, host)
        return host

    def cuda(self):
        """Return the program's object for this device."""
        from hpc3d.cuda.device import Cuda

        return Cuda(0)

    def pool(self):
        """Return the program's pool of device arrays, with the rules of all kernels."""
        from hpc3d.comm.pinned_store import PinnedStore
        from hpc3d.cuda.device import DevicePool
        from hpc3d.cuda.gpu import use

        if self.shared is None:  # the rules are those of one pool, whose memory they work in
            self.shared = DevicePool(self.cuda())
            self.shared.store = PinnedStore(self.shared)
            use(self.shared)
        return self.shared

    def launch(self):
        """Return the program's launcher: launch(name, rows, columns, **given)."""
        from hpc3d.cuda.kernel_loader import Kernels

        return Kernels()

    def direct(self):
        """Return a separate launcher, in case the program's launcher does not start."""
        return Direct(self.cupy)

    def lt(self, tf32=False):
        """Return products on the current stream."""
        self.workspace = self.memory(WORKSPACE)
        stream = self.cupy.cuda.get_current_stream().ptr
        return lt_on(stream, self.workspace, tf32)

    def flash(self):
        """Return fused attention on the current stream."""
        from hpc3d.cuda.cudnn_attention import Flash

        if missing := Flash.missing():
            raise Skip(f"no {missing}")
        return flash_on(self.cupy, self.cupy.cuda.get_current_stream().ptr)

    def seconds(self, function, repeats):
        """Return the median time of `repeats` calls of `function`, by the device's clock."""
        event = self.cupy.cuda.Event
        times = []
        for _ in range(repeats):
            start, stop = event(), event()
            self.synchronize()
            start.record()
            function()
            stop.record()
            self.synchronize()
            times.append(self.cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
        return float(np.median(times))


def lt_on(stream, workspace, tf32=False):
    from hpc3d.cuda.cublaslt import Lt

    return Lt(stream, (workspace.ptr, WORKSPACE), tf32)


def flash_on(cupy, stream):
    from hpc3d.cuda.cudnn_attention import Flash

    return Flash(cupy.empty, stream, cupy.cuda.Device().compute_capability)


def options():
    """Return the compiler options, those of the program if possible, because CuPy caches compiled
    kernels by their options."""
    try:
        from hpc3d.cuda import kernel_loader
    except Exception:
        ours = [option for option in launch_table.OPTIONS if option != ADDED]
        return *ours, f"-I{launch_table.FOLDER}"
    return kernel_loader.options()


class Direct:
    """Kernels loaded with CuPy's RawModule, on the current stream."""

    def __init__(self, cupy):
        self.cupy, self.modules = cupy, {}

    def module(self, source):
        """Compile all instances in a source file."""
        if source not in self.modules:
            found = [k for k in launch_table.kernels().values() if k.source == source]
            instances = [each for kernel in found for each in kernel.instances]
            text = launch_table.text(source)
            self.modules[source] = self.cupy.RawModule(
                code=text, options=options(), name_expressions=instances
            )
        return self.modules[source]

    def __call__(self, name, rows, columns, /, **given):
        kernel = launch_table.kernels()[name]
        real, values = kernel.bind(lambda array: np.dtype(array.dtype).name, given)
        grid, block = kernel.launch(real, rows, columns)
        if 0 in grid:
            return
        function = self.module(kernel.source).get_function(kernel.expression(real))
        values = [np.uintp(0) if value is None else value for value in values]
        function(grid, block, tuple(values))
