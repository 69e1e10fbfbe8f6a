"""Training Transformers on a cube of MPI ranks: 1-D, 2-D, 2.5-D and 3-D in one algebra.

From Python (docs/api.md):

    from hpc3d import Grid, Layout, Matmul, SCHEDULES, SCHEMES, Split, load_config, run_threads
"""

__version__ = "0.1.0"

# The Python interface.  A name is imported when it is first asked for: a rank pays for nothing
# that it does not use.
PUBLIC = {
    "Grid": "hpc3d.comm.grid:Grid",
    "Layout": "hpc3d.tensor.layout:Layout",
    "Matmul": "hpc3d.tensor.matmul:Matmul",
    "SCHEDULES": "hpc3d.pipeline.schedule:SCHEDULES",
    "SCHEMES": "hpc3d.tensor.split:SCHEMES",
    "Split": "hpc3d.tensor.split:Split",
    "load_config": "hpc3d.config.load:load",
    "run_threads": "hpc3d.comm.threads:run",
}


def __getattr__(name):
    if name not in PUBLIC:
        raise AttributeError(f"module 'hpc3d' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__():
    return sorted([*globals(), *PUBLIC])
