"""Layout of an evaluation, which may differ from the layout of the training run.

Evaluations support every mesh axis and scheme. The loss does not depend on the layout, except for
rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hpc3d.comm.grid import AXES, divisors
from hpc3d.config import deprecated_keys
from hpc3d.config.backend_rules import untrainable
from hpc3d.config.input_file import (
    Config,
    DataConfig,
    MeshConfig,
    ParallelConfig,
    TrainConfig,
)
from hpc3d.config.load import options, override, to_toml, validate
from hpc3d.config.resolve import refuse, resolve, violated
from hpc3d.config.rules import unknown_values
from hpc3d.console import small_files
from hpc3d.generation.tensor_layout import undisturbed
from hpc3d.pipeline.schedule import find

# ACCEPTED: beginnings of the options that an evaluation accepts.
# _TRAIN, _PARALLEL: keys of the training run that affect a forward pass.
ACCEPTED = "mesh.", "parallel.", "train.batch", "train.dtype", "train.product_"
ACCEPTED += "train.backend", "train.tf32", "train.fused_gelu"
_TRAIN = "batch", "dtype", "product_dtype", "product_scale", "backend", "tf32", "fused_gelu"
_SCHEME = "scheme", "split"
_PARALLEL = *_SCHEME, "zero", "shard", "prefetch", "chunked_products", "microbatches", "chunks"
_PARALLEL += "layers_per_stage", "context", "ulysses", "attention", "schedule"
_SIZES = {f"mesh.{axis}" for axis in AXES}
_TOKENS = 4096  # tokens of a microbatch per rank of a pipeline stage, at least


def evaluation_layout(trained: Config, words: Sequence[str], ranks: int) -> Config:
    """Return the resolved configuration for evaluations on `ranks` ranks.

    `words` are command-line options such as `--mesh.x 2`. The default mesh is that of the training
    run if it has `ranks` ranks. Otherwise, it is the x by y by z grid of `ranks` ranks with the
    least communication. Unless `words` sets parallel.microbatches, the batch is split into
    microbatches of at least _TOKENS tokens per rank of a pipeline stage. Raises ValueError with
    one line per violated rule.
    """
    given = {option.removeprefix("--") for option, _ in options(words)}
    tree = small_files.toml(to_toml(_base(trained, given, ranks)))
    deprecated_keys.warn(override(tree, words))
    config = validate(tree, partial(violated, ranks=ranks))
    refuse([*unknown_values(config)])
    if "parallel.microbatches" not in given:
        config = _with_microbatches(config, ranks)
    config = resolve(config, ranks)
    refuse([*untrainable(config)])
    return config


def _base(trained: Config, given: set[str], ranks: int) -> Config:
    """Return the configuration of an evaluation without the options of the command line.

    `given` contains the keys that the command line sets.
    """
    parallel, mesh = trained.parallel, trained.mesh
    own = mesh.grid().size == ranks and not given & _SIZES
    keep: dict[str, Any] = {key: getattr(parallel, key) for key in (_PARALLEL if own else _SCHEME)}
    if own and "parameters" in parallel.offload:
        keep["offload"] = ("parameters",)
    if own and find(parallel.schedule or "none").asynchronous:
        keep["schedule"] = None  # the default schedule has the same placement, and fewer rules
    if "parallel.scheme" in given:
        keep["split"] = None
    return Config(
        name=trained.name,
        mesh=mesh if own else MeshConfig(order=mesh.order, transport=mesh.transport),
        parallel=ParallelConfig(**keep),
        model=undisturbed(trained.model),
        data=DataConfig(boundaries=trained.data.boundaries, separator=trained.data.separator),
        train=TrainConfig(**{key: getattr(trained.train, key) for key in _TRAIN}),
    )


def _with_microbatches(config: Config, ranks: int) -> Config:
    """Return `config` with the largest number of microbatches that the layout supports.

    Each microbatch has at least _TOKENS tokens per rank of a pipeline stage.
    """
    batch, least = config.train.batch, _TOKENS * (ranks // config.mesh.p)
    for count in reversed(divisors(batch)):
        few = replace(config, parallel=replace(config.parallel, microbatches=count))
        if batch // count * config.model.sequence >= least and not violated(few, ranks):
            return few
    return config
