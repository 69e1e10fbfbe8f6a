"""List the contents of a checkpoint, and check that it is complete."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from hpc3d.checkpoints.block_slices import coverage_error, stored_shape, whole_of
from hpc3d.checkpoints.sharded import Checkpoint, named, steps_of
from hpc3d.comm.communicator import Self
from hpc3d.comm.mesh import Mesh
from hpc3d.config.input_file import Config, ModelConfig
from hpc3d.config.load import stored
from hpc3d.config.package_data import refuse_model
from hpc3d.config.resolve import refuse
from hpc3d.config.rules import unknown_values
from hpc3d.config.size_rules import wrong_parts
from hpc3d.console.sanitize import Problems, counted, lines_of
from hpc3d.model.families import family_of, parameters
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LayerRange, build
from hpc3d.tensor.split import Split
from hpc3d.training.gradient_compression import OWN_STATES
from hpc3d.training.optimizers.catalog import state_kinds, states_of
from hpc3d.training.optimizers.optimizer import MASTER

log = logging.getLogger(__name__)


class Tensor(NamedTuple):
    """Parameter stored in a checkpoint, with its unsharded `shape`.

    `kinds` lists the kinds of its arrays (the value and the optimizer states), and `bytes` is
    their total size.
    """

    name: str
    shape: tuple
    dtype: str
    kinds: tuple
    bytes: int


def checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint folders at a path, newest first.

    The path may be a checkpoint or a run folder. Raises ValueError if it contains no checkpoint.
    """
    path = Path(path)
    if (path / "manifest.json").exists() or path in steps_of(path.parent):
        return [path]
    found = steps_of(path / "checkpoints") or steps_of(path)
    if not found:
        refuse_model(path)
        what = "has no checkpoint" if path.exists() else "does not exist"
        raise ValueError(
            f"{path} {what}; specify a run that saves checkpoints (checkpoint.every), or a "
            "checkpoint folder such as step-00000010"
        )
    return found


def latest(parent: Path) -> str:
    """Return the name of the most recently completed checkpoint, or '' if it is not recorded."""
    try:
        return (parent / "latest").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def best_of(folders: Sequence[Path]) -> str:
    """Return the name of a run's checkpoint with the lowest evaluation loss, or '' if unknown.

    The name is read from the newest readable checkpoint in `folders`.
    """
    for folder in folders:
        with suppress(OSError, ValueError):
            best = Checkpoint(folder).header.get("best")
            return named(best["step"]) if best else ""
    return ""


def config_of(opened: Checkpoint) -> Config:
    """Return the configuration of the run that wrote a checkpoint.

    Raises ValueError if the manifest has no valid configuration.
    """
    try:
        config = stored(opened.header["config"])
        refuse([*unknown_values(config), *wrong_parts(config)])
        if config.model.vocabulary is None and not config.torch.factory:
            raise ValueError("model.vocabulary is not set")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = "; ".join(lines_of(error))
        raise ValueError(f"{opened.folder}: invalid configuration in manifest: {reason}") from None
    return config


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return a dict from parameter name to unsharded shape, in the order of the forward pass."""
    return {item.name: item.shape for item in _parameters_of(model)}


def stateless_of(model: ModelConfig) -> frozenset[str]:
    """Return the names of a model's parameters that have no optimizer states."""
    return frozenset(item.name for item in _parameters_of(model) if item.sign_rate)


def _parameters_of(model: ModelConfig) -> Parameters:
    """Return the parameters of an unsharded model without allocating their arrays."""
    mesh = Mesh({}, {}, {}, Self())
    found = Parameters(mesh, "float32")
    whole = LayerRange(range(model.layers), True, True)
    family = family_of(model)
    sizes = family.sizes(model, model.vocabulary)
    splits = {"dense": Split(), "experts": Split()}
    build(mesh, found, ModelSpec(family, sizes, splits), [whole])
    return found


def shapes_in(opened: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return a dict from parameter name to unsharded shape for all parameters of a checkpoint.

    Raises ValueError if the number of layers differs from the stored configuration.
    """
    if module := opened.header.get("module"):
        return {name: stored_shape(shape) for name, shape in module["shapes"].items()}
    model = config_of(opened).model
    layers = {name.split(".")[1] for name, _ in opened.sources if name.startswith("layers.")}
    if len(layers) != model.layers:
        raise ValueError(
            f"{opened.folder} is damaged: it has {counted(len(layers), 'layer')}, but "
            f"model.layers = {model.layers}"
        )
    return shapes_of(model)


def _stateless_in(opened: Checkpoint) -> Collection[str]:
    if module := opened.header.get("module"):
        return module["frozen"]
    return stateless_of(config_of(opened).model)


def tensors(opened: Checkpoint) -> Iterator[Tensor]:
    """Yield a `Tensor` for each parameter in a checkpoint."""
    for name, held in _arrays_of(opened, shapes_in(opened), _stateless_in(opened)):
        dtypes = {
            kind: opened.sources[name, kind][0][0].dtype
            for kind in held
            if (name, kind) in opened.sources
        }
        nbytes = sum(prod(held[kind]) * dtype.itemsize for kind, dtype in dtypes.items())
        first = next((dtype.name for dtype in dtypes.values()), "")
        yield Tensor(name, held["value"], first, (*held,), nbytes)


def _arrays_of(
    opened: Checkpoint, shapes: Mapping[str, tuple[int, ...]], stateless: Collection[str]
) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield, for each parameter, its name and a dict from array kind to shape.

    The kinds are the value and the optimizer states. `stateless` names the parameters that have
    no optimizer states.
    """
    kinds, specs = kinds_of(opened), (MASTER, *states_of(config_of(opened)))
    for name, shape in shapes.items():
        held = [
            spec
            for spec in specs
            if spec.name in kinds
            and (spec.outer or name not in stateless)
            and spec.of(name, shape)
        ]
        shards = {spec.codes: opened.shards(name, spec.codes, shape) for spec in held}
        states = {spec.name: spec.shape(shape, shards[spec.codes]) for spec in held}
        yield name, {"value": shape} | states


def kinds_of(opened: Checkpoint) -> tuple[str, ...]:
    """Return the kinds of arrays in a checkpoint, starting with the parameter value."""
    found = {kind for _, kind in opened.sources}
    return ("value", *(kind for kind in state_kinds() if kind in found))


def about(opened: Checkpoint) -> dict[str, Any]:
    """Return a JSON-serializable description of a checkpoint, for the `show` command.

    For a mixture of experts, `active` is the number of parameters used for each token.
    """
    config, held = config_of(opened), [*tensors(opened)]
    parallel, written = config.parallel, (opened.folder / "manifest.json").stat().st_mtime
    return {
        "folder": str(opened.folder),
        "step": opened.header["step"],
        "updates": opened.header["updates"],
        "written_utc": datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds"),
        "best": opened.header.get("best"),
        "files": len(opened.files),
        "mesh": {axis: size for axis, size in config.sizes().items() if size > 1},
        "parallel": {
            "scheme": parallel.scheme,
            "split": parallel.split,
            "schedule": parallel.schedule,
            "zero": parallel.zero,
        },
        "tensors": [tensor._asdict() for tensor in held],
        "parameters": sum(prod(tensor.shape) for tensor in held),
        "active": int(parameters(config.model).active) if config.model.experts else None,
        "bytes": sum(file["bytes"] for file in opened.files),
    }


def problems(folder: Path) -> list[str]:
    """Check a checkpoint by reading all its files; return one line per problem."""
    try:
        opened = Checkpoint(folder)
        shapes = shapes_in(opened)
        config_of(opened)  # raises ValueError if damaged
    except ValueError as error:
        return [str(error)]
    damaged, count = [], len(opened.files)
    for number in range(count):
        log.info("reading file %d of %d of %s", number + 1, count, folder.name)
        damaged.append(opened.damage(number, count))
    return [*filter(None, damaged), *inconsistencies(opened, shapes, _stateless_in(opened))]


def newest_whole(folders: Sequence[Path]) -> tuple[Checkpoint, list[str]]:
    """Return the first intact checkpoint in `folders`, and the problems of the skipped folders.

    Raises ValueError with all problems if no checkpoint is intact.
    """
    wrong = []
    for folder in folders:
        found = problems(folder)
        if not found:
            return Checkpoint(folder), wrong
        wrong += found
    raise Problems(wrong)


def inconsistencies(
    opened: Checkpoint, shapes: Mapping[str, tuple[int, ...]], stateless: Collection[str] = ()
) -> Iterator[str]:
    """Yield an error line for each inconsistency between a manifest and a model's `shapes`.

    An inconsistency is a step number that differs from the folder name, a tensor that the model
    does not have, or a tensor whose elements are not all stored exactly once. Rank-local states
    are not checked. `stateless` names the parameters that have no optimizer states.
    """
    folder, step = opened.folder, opened.header["step"]
    if folder.name.startswith("step-") and folder.name != named(step):
        yield f"{folder}: manifest.json belongs to step {step}, which differs from the folder name"
    held = {
        (name, kind): shape
        for name, arrays in _arrays_of(opened, shapes, stateless)
        for kind, shape in arrays.items()
    }
    for name, kind in opened.sources.keys() - held.keys():
        if kind not in OWN_STATES:
            yield f"{folder}: the model has no {name}, {kind}"
    stored = [(opened.sources, held), *((each, held.keys() & each) for each in opened.workers[1:])]
    for sources, keys in stored:
        for name, kind in keys:
            boxes = [box for _, box in sources.get((name, kind), ()) if box.size]
            if fault := coverage_error(boxes, whole_of(held[name, kind])):
                yield f"{folder}: {name}, {kind}: {fault}"
