"""The house has floors: a module imports from its own folder or from a lower floor, and rooms have
no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "hpc3d"
MODULES = sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in ROOT.rglob("*.py"))

FLOORS = [
    {"__version__", "console"},
    {"arrays", "runtime"},
    {"cuda", "data"},
    {"comm", "ops"},
    {"tensor", "diagnose"},
    {"model"},
    {"pipeline"},
    {"config"},
    {"trace"},
    {"training"},
    {"analyze", "checkpoints"},
    {"predict", "generation"},
    {"partition"},
    {"studies", "benchmarks", "library"},
]
FLOOR = {folder: number for number, folders in enumerate(FLOORS) for folder in folders}

HOMES = {
    "mpi4py": {"comm", "runtime", "diagnose"},
    "cupy": {"cuda", "comm"},
    "h5py": {"trace/file", "checkpoints/sharded", "data/token_file"},
    "torch": {"partition", "benchmarks/torch_reference"},
    "matplotlib": {"analyze", "studies"},
    "bokeh": {"analyze"},
    "jinja2": {"analyze"},
}


def imports(source: str) -> set[str]:
    """The full dotted name of everything that is imported, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides its floor"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor(name: str) -> int:
    """The floor of a folder; the commands are on top."""
    return FLOOR.get(name, len(FLOORS))


def climbs(module: str, source: str) -> set[str]:
    """What `source`, the text of `module`, imports from its own floor or from above."""
    here = module if module.endswith("/__main__") else module.partition("/")[0]
    ours = {name: name.split(".")[1] for name in imports(source) if name.startswith("hpc3d.")}
    above = {name for name, there in ours.items() if floor(there) >= floor(here)}
    return {name for name in above if ours[name] != module.partition("/")[0]}


def strays(module: str, source: str) -> set[str]:
    """The libraries that `module` imports although they are at home elsewhere."""
    libraries = {name.partition(".")[0] for name in imports(source)} & HOMES.keys()
    place = {module, module.partition("/")[0]}
    return {library for library in libraries if not HOMES[library] & place}


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_only_lower_layers(module):
    source = (ROOT / module).with_suffix(".py").read_text(encoding="utf-8")
    assert not climbs(module, source)
    assert not strays(module, source)


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("tensor/matmul", "from hpc3d.comm.mesh import Mesh", set()),
        ("tensor/matmul", "from hpc3d.tensor.layout import Layout", set()),
        ("tensor/matmul", "from hpc3d.trace import schema", {"hpc3d.trace.schema"}),
        ("trace/file", "def f():\n    import hpc3d.training.log", {"hpc3d.training.log"}),
        ("pipeline/engine", "from hpc3d.config import load", {"hpc3d.config.load"}),
        ("training/trainer", "from hpc3d import __version__, console", set()),
        ("predict/cut", "from hpc3d.partition import graph", {"hpc3d.partition.graph"}),
        ("train", "from hpc3d.analyze import machine", set()),
        ("train", "from hpc3d import plan", {"hpc3d.plan"}),
        ("analyze/search", "from hpc3d import plan", {"hpc3d.plan"}),
    ],
)
def test_upward_import_is_detected(module, source, found):
    assert climbs(module, source) == found


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("comm/mesh", "from mpi4py import MPI", set()),
        ("tensor/matmul", "from mpi4py import MPI", {"mpi4py"}),
        ("trace/file", "def f():\n    import h5py", set()),
        ("trace/recorder", "def f():\n    import h5py", {"h5py"}),
        ("training/trainer", "import torch.nn.functional", {"torch"}),
        ("report", "import matplotlib.pyplot as plt", {"matplotlib"}),
        ("cuda/kernel_loader", "import cupy", set()),
    ],
)
def test_disallowed_library_import_is_detected(module, source, found):
    assert strays(module, source) == found


def room(module):
    """The folder of a module, "" for one that lies beside the folders."""
    return module.rpartition("/")[0]


def test_packages_have_no_import_cycle():
    above = {}
    for module in MODULES:
        source = (ROOT / module).with_suffix(".py").read_text(encoding="utf-8")
        names = {name.removeprefix("hpc3d.").replace(".", "/") for name in imports(source)}
        rooms = {room(name if name in MODULES else room(name)) for name in names}
        above.setdefault(room(module), set()).update(rooms - {room(module), ""})
    TopologicalSorter(above).prepare()


def test_modules_have_no_import_cycle():
    """Types, too, which only a checker imports."""
    above = {}
    for module in MODULES:
        source = (ROOT / module).with_suffix(".py").read_text(encoding="utf-8")
        names = {name.removeprefix("hpc3d.").replace(".", "/") for name in imports(source)}
        above[module] = {name if name in MODULES else room(name) for name in names} - {module}
    TopologicalSorter(above).prepare()
