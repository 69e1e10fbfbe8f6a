"""Layouts of the shipped inputs."""

from pathlib import Path

from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.predict.simulation.simulator import load_resolved
from tests.mpi import ROOT

# Keys of inputs without a mesh, and fewer layers for deep models, so that the tests are short.
_DEEP = "--mesh.p 4 --mesh.d 2 --mesh.x 2 --mesh.y 2 --mesh.z 2 --parallel.zero 1 --model.layers 8"
_KEYS = {
    "gshard-600b": "--mesh.e 128 --mesh.x 2 --train.batch 256 --model.layers 8",
    "switch-c": "--mesh.e 32 --mesh.x 2 --mesh.d 2 --train.batch 128 --model.layers 8",
    "gpt-3d-64gpu": "--model.layers 4",
    "gpt-text": "--mesh.x 1",
    "moe-text": "--mesh.x 1",
}


def _keys(path: Path) -> list[str]:
    return _KEYS.get(path.stem, _DEEP if path.parent.name == "models" else "").split()


SHIPPED = {
    path.stem: (str(path), *_keys(path))
    for folder in (ROOT / "inputs", ROOT / "inputs" / "models")
    for path in sorted(folder.glob("*.toml"))
}


def blocks_of(name, *keys, hosts=()):
    """Return the blocks of an input; keys override the keys of the input."""
    return RankBlocks(load_resolved(name, keys), hosts)
