"""Summary of a run before it starts, for `train --dry-run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc3d.config.input_file import Config, TrainConfig
from hpc3d.config.package_data import DEFAULT_MACHINE, MACHINE, MEASURED, find
from hpc3d.console.sanitize import counted
from hpc3d.model import families
from hpc3d.predict.machine.machine import Machine
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import simulate
from hpc3d.predict.simulation.summary import mean_received, summary
from hpc3d.runtime import host_memory
from hpc3d.trace.schema import MEMORY_KIND
from hpc3d.training.log import duration, layout_lines

_UNMEASURED = (
    "this machine has not been measured; run python -m hpc3d.bench calibrate, or select another "
    "machine, for example with --machine h100"
)


def dry_run(config: Config, machine: str | None, epochs: Sequence[float]) -> Iterator[str]:
    """Yield the lines that `train --dry-run` prints for a resolved `config`.

    `machine` is the name of a machine; the default is the local machine if it has been measured.
    `epochs` has the number of epochs of each training text. Raises ValueError if the machine does
    not exist.
    """
    known, untimed = _machine(machine, config.train.dtype)
    yield _ranks(config)
    yield from layout_lines(config)
    yield _model(config)
    yield _learning_rate(config.train)
    steps = counted(config.train.steps, "step")
    for path, number in zip(config.data.paths(), epochs, strict=True):
        yield f"text: {path}; {number:.3g} epochs in {steps}"
    runs = simulate(config, config.model.vocabulary, known)
    found = summary(runs, config, known)
    yield _memory(config, found["memory"], None if machine is None else known)
    yield from _parts(found["memory"])
    yield _bytes(mean_received(runs[0], config.parallel.local_steps), config)
    if untimed:
        yield f"time: not predicted, because {untimed}"
    else:
        yield _time(config, found["step_time_s"], known)


def _machine(name: str | None, dtype: str) -> tuple[Machine, str]:
    """Return the machine for predictions, and the reason if times cannot be predicted.

    The reason is "" if times can be predicted.
    """
    if name is not None:
        return load(name), ""
    try:
        path = find(MEASURED, MACHINE)
    except ValueError:
        return _stand_in(), _UNMEASURED
    if dtype in (machine := load(path)).gemm:
        return machine, ""
    return _stand_in(), f"{path} has no GEMM rates for {dtype}"


def _stand_in() -> Machine:
    """Return the default machine, with added GEMM rates for float64 if the machine has none.

    It is used to predict memory and communication volume, which do not depend on the machine.
    """
    machine = load(DEFAULT_MACHINE)
    return replace(machine, gemm={"float64": machine.gemm["float32"]} | machine.gemm)


def _ranks(config: Config) -> str:
    sizes = " ".join(f"{axis}={size}" for axis, size in config.sizes().items() if size > 1)
    ranks = config.grid().size
    return f"{counted(ranks, 'rank')}: {sizes or 'serial'}"


def _model(config: Config) -> str:
    model, train = config.model, config.train
    count = families.parameters(model).total
    return (
        f"model: {model.kind}, {count:,.0f} parameters; {counted(train.batch, 'sequence')} = "
        f"{counted(train.batch * model.sequence, 'token')} per step"
    )


def _learning_rate(train: TrainConfig) -> str:
    line = f"learning rate: up to {train.learning_rate:.3g} by step {max(train.warmup - 1, 0)}"
    if train.decay == "constant":
        return line
    begin, end = train.decaying() - train.falling(), train.decaying()
    return (
        f"{line}, {train.decay} from step {begin} down to {train.least_rate():.3g} by step {end}"
    )


def _memory(config: Config, found: dict, machine: Machine | None) -> str:
    """Return a line with the largest peak memory of a rank, and the sum over all ranks.

    The line also states whether the run fits in memory.
    """
    peak = found["worst"]["all"]
    line = (
        f"memory: peak of {_size(peak)} on the rank that needs the most, "
        f"{_size(found['total'])} on all ranks"
    )
    if machine:
        fits = "fits" if found["fits"] else "does not fit"
        return f"{line}; {fits} in the {machine.memory_gb:g} GB of a rank of {machine.name}"
    if config.train.backend == "numpy":
        there, ranks = host_memory.total(), config.grid().size
        most = f"only {int(there // peak)} of {ranks} ranks fit"
        fit = "all ranks fit" if found["total"] <= there else most
        line += f"; {fit} in the {_size(there)} of this machine"
    return line


def _parts(found: dict) -> Iterator[str]:
    """Yield a line with the peak memory by kind, on the rank that needs the most, and a line with
    the peak memory of each pipeline stage."""
    kinds = [kind for kind in MEMORY_KIND if kind != "all" and found["worst"][kind]]
    held = ", ".join(f"{kind} {_size(found['worst'][kind])}" for kind in kinds)
    products = "communication buffers also hold the results of matrix products"
    sums = "the kinds peak at different times, so their sum can exceed the peak"
    yield f"peak memory by kind, on the rank that needs the most: {held}; {products}; {sums}"
    if len(found["stages"]) > 1:
        yield "peak memory by stage: " + ", ".join(
            _size(stage["all"]) for stage in found["stages"]
        )


def _bytes(received: float, config: Config) -> str:
    line = f"communication: a rank of the first stage receives {_size(received)} per step"
    parallel = config.parallel
    if parallel.local_steps > 1:
        agreement = "which overlap with" if parallel.sync == "stale" else "one of which has"
        line += f", averaged over {parallel.local_steps} steps, {agreement} an agreement"
    return line


def _time(config: Config, seconds: float, machine: Machine) -> str:
    steps = config.train.steps
    return (
        f"time on {machine.name}: {duration(seconds)} per step, {duration(steps * seconds)} for "
        f"{counted(steps, 'step')}"
    )


def _size(count: float) -> str:
    for unit, size in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e3:.3g} kB"
