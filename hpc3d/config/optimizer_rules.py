"""Rules about optimisers: what blocks of matrices they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.model.families import family_of
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LayerRange, build
from hpc3d.ops.quantize import BLOCK, in_blocks

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config


def wrong_blocks(config: Config) -> Iterator[str]:
    """Columns of a matrix on a rank that are no whole blocks of 8-bit moments; all sizes divide
    over the mesh."""
    if config.train.optimizer != "adamw-8bit":
        return
    parameters = _parameters_of(config)
    for item in parameters:
        columns = item.updated_layout.block(item.shape, parameters.mesh)[-1]
        if in_blocks(item.shape) and columns % BLOCK:
            yield (
                f"train.optimizer = adamw-8bit: a rank has {columns} columns of {item.name}, no "
                f"multiple of {BLOCK}; use other sizes in [model] or [mesh], or train.optimizer = "
                "adamw"
            )
            return


def _parameters_of(config: Config) -> Parameters:
    """The parameters of both ends and of as many layers as differ, without arrays."""
    model, family = config.model, family_of(config.model)
    found = Parameters(Mesh(config.mesh.sizes(), {}, {}, Self()), "float32", config.parallel.zero)
    sizes = family.sizes(model, model.vocabulary or BLOCK)
    spec = ModelSpec(family, sizes, config.splits, context=config.context())
    layers = range(min(model.moe_every, model.layers))
    build(found.mesh, found, spec, [LayerRange(layers, True, True)])
    return found
