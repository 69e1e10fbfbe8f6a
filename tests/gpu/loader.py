"""Every instance of every kernel is compiled with RawModule, file by file; then the program's own
loader launches one kernel."""

import time
from functools import partial

import numpy as np

from hpc3d.cuda import launch_table
from tests.gpu.guards import guarded
from tests.gpu.notes import Skip

WANTED = "num_regs", "local_size_bytes", "shared_size_bytes", "max_threads_per_block"


def cases(device, quick):
    direct = device.direct()
    for source in launch_table.sources():
        yield source, partial(compiled, source, direct, device)
    for real in device.reals:
        yield f"the program's loader [{real}]", partial(launched, device, real)


def compiled(source, direct, device, notes):
    """Report seconds (a second run is fast, because CuPy caches on disk), registers and spills."""
    if device.fake:
        raise Skip("a fake device compiles nothing")
    start = time.perf_counter()
    module, found = direct.module(source), {}
    for kernel in [k for k in launch_table.kernels().values() if k.source == source]:
        for instance in kernel.instances:
            attributes = module.get_function(instance).attributes
            found[instance] = [attributes.get(name) for name in WANTED]
            fits = attributes["max_threads_per_block"] >= kernel.threads
            notes.check(f"{instance} may have its threads", fits, attributes=attributes)
    notes.fact("seconds", round(time.perf_counter() - start, 3))
    notes.fact("registers, local and shared bytes, threads", found)


def launched(device, real, notes):
    """Launch a kernel that adds two arrays of 1,000 elements."""
    launch = guarded(device, device.launch())
    x = np.arange(1000, dtype=np.float32).astype(real)
    out = np.full(1000, np.nan, np.float32).astype(real)
    launch("add", 1, 1000, x=x, y=x, out=out, size=1000)
    notes.same("x + x", out, (x.astype(np.float32) * 2).astype(real), 0)
    notes.fact("loader", type(device.launch()).__module__)


def launcher(device):
    """Return the program's launcher, or a separate one if it does not start."""
    try:
        return Once(device.launch())
    except Exception:
        return Once(device.direct())


class Once:
    """Launcher that does not retry failed compilations."""

    def __init__(self, launch):
        self.launch, self.refused = launch, {}

    def __call__(self, name, rows, columns, /, **given):
        source = launch_table.kernels()[name].source
        if source in self.refused:
            raise self.refused[source]
        try:
            self.launch(name, rows, columns, **given)
        except Exception as error:
            if type(error).__name__ == "CompileException":
                self.refused[source] = error
            raise
