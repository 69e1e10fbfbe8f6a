"""Training Transformers on a cube of MPI ranks: 1-D, 2-D, 2.5-D and 3-D tensor parallelism.

From Python (docs/api.md):

    import hpc3d

    cube = hpc3d.Cube(x=2, y=2, z=2)        # ranks are threads
    y = cube.matmul(x, w)                   # 3-D algorithm; cube.calls lists the communication
    run = hpc3d.open("results/RUN")         # run.verdict, run.losses, run.timeline()
"""

import re
import signal
import sys

__version__ = "0.2.0"

# While a command imports its modules, Ctrl-C terminates the command without a traceback.  Once the
# modules are loaded, command_line.run or launch.run handles the signal.  `python -m` sets
# sys.argv[0] to "-m" while it imports the package.
_program = "".join(sys.argv[:1])
_is_command = _program.endswith("/hpc3d") or (
    _program == "-m" and any(re.match("(-m)?hpc3d", word) for word in sys.orig_argv)
)
if _is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _explain(kind, error, trace):
    """Print one line if a required package is missing, otherwise print the traceback."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    remedy = "activate the environment of hpc3d (source .venv/bin/activate), or install hpc3d"
    print(f"hpc3d: {error}; {remedy}", file=sys.stderr)


if _is_command:
    sys.excepthook = _explain

TYPE_CHECKING = False
if TYPE_CHECKING:  # only for editors and type checkers; at run time, PUBLIC lists these names
    from hpc3d.comm.grid import Grid as Grid
    from hpc3d.comm.threads import run as run_threads  # noqa: F401
    from hpc3d.config.load import load as load_config  # noqa: F401
    from hpc3d.library.commands import find_layouts as find_layouts
    from hpc3d.library.commands import open_run as open  # noqa: F401
    from hpc3d.library.commands import predict_step as predict_step
    from hpc3d.library.commands import run_training as run_training
    from hpc3d.library.commands import simulate_schedule as simulate_schedule
    from hpc3d.library.cube import Cube as Cube
    from hpc3d.pipeline.schedule import SCHEDULES as SCHEDULES
    from hpc3d.tensor.layout import Layout as Layout
    from hpc3d.tensor.matmul import sharded_matmul as Matmul  # noqa: F401
    from hpc3d.tensor.split import SCHEMES as SCHEMES
    from hpc3d.tensor.split import Split as Split

# Public Python interface: name -> module:attribute.  Each name is imported on first access, so
# that ranks import only the modules that they use.
PUBLIC = {
    "Cube": "hpc3d.library.cube:Cube",
    "Grid": "hpc3d.comm.grid:Grid",
    "Layout": "hpc3d.tensor.layout:Layout",
    "Matmul": "hpc3d.tensor.matmul:sharded_matmul",
    "SCHEDULES": "hpc3d.pipeline.schedule:SCHEDULES",
    "SCHEMES": "hpc3d.tensor.split:SCHEMES",
    "Split": "hpc3d.tensor.split:Split",
    "find_layouts": "hpc3d.library.commands:find_layouts",
    "load_config": "hpc3d.config.load:load",
    "open": "hpc3d.library.commands:open_run",
    "predict_step": "hpc3d.library.commands:predict_step",
    "run_threads": "hpc3d.comm.threads:run",
    "run_training": "hpc3d.library.commands:run_training",
    "simulate_schedule": "hpc3d.library.commands:simulate_schedule",
}


def __getattr__(name):
    if name not in PUBLIC:
        raise AttributeError(f"module 'hpc3d' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = PUBLIC[name].partition(":")
    return getattr(import_module(module), attribute)


def __dir__():
    return sorted([*globals(), *PUBLIC])
