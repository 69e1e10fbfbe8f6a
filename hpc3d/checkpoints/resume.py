"""Resume a run from its newest intact checkpoint, and report changed settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.checkpoints.inspect import (
    config_of,
    inconsistencies,
    kinds_of,
    shapes_of,
    stateless_of,
)
from hpc3d.checkpoints.run_text import differences, used_by_text
from hpc3d.checkpoints.sharded import Checkpoint, restore, restore_own, steps_of
from hpc3d.config import deprecated_keys
from hpc3d.config.input_file import Config, MeshConfig, ParallelConfig, TrainConfig
from hpc3d.config.load import flat, load, override, read, to_toml, validate
from hpc3d.config.package_data import refuse_model
from hpc3d.config.resolve import refuse, resolve
from hpc3d.config.rules import unknown_values
from hpc3d.console.sanitize import Problems, counted, lines_of
from hpc3d.console.small_files import toml
from hpc3d.model.families import with_epsilon
from hpc3d.pipeline.schedule import usual
from hpc3d.training.evaluator import Evaluator, restored
from hpc3d.training.gradient_compression import OWN_STATES
from hpc3d.training.optimizers.catalog import optimizer_of
from hpc3d.training.optimizers.optimizer import learning_rate

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job
    from hpc3d.training.trainer import Trainer

_Differs = Callable[[Checkpoint], str | None]

TRAINING_KEYS = "dropout", "capacity", "balance_loss", "z_loss"  # [model] keys only for training
# Keys of [parallel] that determine a rank's parameter blocks and gradient compression states.
_OF_LAYOUT = "scheme", "split", "schedule", "chunks", "layers_per_stage", "compression"
_OF_LAYOUT += ("compression_rank", "compression_share")
_OF_ANOTHER = "the checkpoint belongs to another model or optimizer"
_ANEW = (
    "resume: the error feedback of parallel.compression is reset to 0, because the checkpoint "
    "was written with another layout, data type or compression method"
)
_DROPPED = (
    "resume: the error feedback of parallel.compression is discarded, because this run does not "
    "compress gradients"
)
_MEAN = (
    "resume: each worker continues from the mean parameters of {} workers, and from the optimizer "
    "states of one of them"
)
_NOTHING = "{}: no checkpoint to resume from; start a new run, and set checkpoint.every"


def run_to_resume(words: list[str]) -> Path | None:
    """Remove --resume and its value from command-line arguments; return the run folder.

    Returns `None` if `words` does not contain --resume.
    """
    for index, word in enumerate(words):
        if word.startswith("--resume="):
            words[index : index + 1] = word.split("=", 1)
    if "--resume" not in words:
        return None
    index = words.index("--resume")
    run = Path((words[index + 1 : index + 2] or [""])[0])
    del words[index : index + 2]
    remedy = "specify a folder results/NAME-STAMP"
    try:
        if _is_run(run):
            return run.absolute()
        refuse_model(run)
        problem = "this is not a run folder"
        for parent in filter(_is_run, run.parents[:2]):
            remedy = f"use --resume {parent!s:.200}, which continues from the newest checkpoint"
    except OSError as error:
        problem = error.strerror
    raise ValueError(f"--resume {run!s:.200}: {problem}; {remedy}")


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").exists() or bool(steps_of(folder / "checkpoints"))


def config_of_run(run: Path, words: Sequence[str]) -> Config:
    """Return the configuration of a run, with `--section.key value` options applied.

    The configuration is read from config.toml or, if this file is missing, from the newest
    checkpoint.

    Raises
    ------
    ValueError
        If config.toml is unreadable, truncated, or lacks keys that are stored in the checkpoint.
    """
    path = run / "config.toml"
    opened = _newest_readable(run)
    if path.exists():
        if opened:
            _refuse_truncated(path, opened)
        return load(path, words, of_run=True)
    if not opened:
        raise ValueError(_NOTHING.format(run))
    tree = toml(to_toml(config_of(opened)))
    deprecated_keys.warn(override(tree, words))
    return validate(tree)


def checkpointed_config(run: Path) -> Config:
    """Return the configuration stored in the newest readable checkpoint of a run.

    If no checkpoint is readable, return the configuration in config.toml.
    """
    opened = _newest_readable(run)
    return config_of(opened) if opened else config_of_run(run, [])


def checkpointed_texts(run: Path) -> dict[str, Any]:
    """Return the descriptions of a run's data files from its newest readable checkpoint.

    The result is empty for checkpoints written by earlier versions of hpc3d, which contain no
    descriptions.
    """
    opened = _newest_readable(run)
    return (opened and opened.header.get("texts")) or {}


def _refuse_truncated(path: Path, opened: Checkpoint) -> None:
    """Raise ValueError if config.toml lacks keys that are stored in a checkpoint of the run."""
    remedy = f"remove config.toml to resume with the settings of {opened.folder.name}"
    try:
        present = _keys_of(read(path))
    except ValueError as error:
        raise ValueError(f"{error}; {remedy}") from None
    # keys whose default is None may be missing: config.toml contains them only if they are set
    needed = {key for key, value in flat(Config()).items() if value is not None}
    if missing := sorted(needed & _keys_of(toml(opened.header["config"])) - present):
        more = f" and {counted(len(missing) - 1, 'more key')}" if len(missing) > 1 else ""
        raise ValueError(f"{path} is truncated and lacks {missing[0]}{more}; {remedy}")


def _keys_of(tree: dict[str, Any]) -> set[str]:
    """Return the keys of an input file as `section.key`, with deprecated names replaced."""
    deprecated_keys.use_new_names(tree)
    return {
        f"{section}.{key}" if isinstance(table, dict) else section
        for section, table in tree.items()
        for key in (table if isinstance(table, dict) else [section])
    }


def _newest_readable(run: Path) -> Checkpoint | None:
    """Return a run's newest checkpoint with a readable manifest and configuration, or `None`."""
    for folder in steps_of(run / "checkpoints"):
        with suppress(ValueError):
            opened = Checkpoint(folder)
            config_of(opened)
            return opened
    return None


def resolved_on(ranks: int, config: Config, run: Path, chosen: Collection[str] = ()) -> Config:
    """Resolve the configuration of a resumed run; reset the parts of its layout that do not apply.

    The user has `chosen` the sizes of some mesh axes, which are not reset.

    Raises
    ------
    ValueError
        If `ranks` ranks cannot train this configuration. An additional line names the axes whose
        sizes were reset.
    """
    stored, free = checkpointed_config(run), with_free_mesh(config, ranks, chosen)
    try:
        return resolve(with_free_schedule(free, stored), ranks)
    except ValueError as error:
        raise Problems([*lines_of(error), *_reset(config.mesh, free.mesh, ranks)]) from None


def _reset(before: MeshConfig, now: MeshConfig, ranks: int) -> Iterator[str]:
    """Yield a line that names the axes whose sizes `with_free_mesh` has reset, if any."""
    sizes = {axis: getattr(before, axis) for axis in "pdce"}
    if reset := [axis for axis, size in sizes.items() if getattr(now, axis) != size]:
        product, was = prod(sizes.values()), " ".join(f"{axis}={sizes[axis]}" for axis in reset)
        yield (
            f"--resume: {was} of the run was reset to 1, because {product} does not divide "
            f"{ranks} ranks; use a multiple of {product} ranks, or other sizes, with "
            f"{' or '.join(f'--mesh.{axis}' for axis in reset)}"
        )


def with_free_mesh(config: Config, ranks: int, chosen: Collection[str] = ()) -> Config:
    """Reset the mesh shape of a stored configuration unless it matches the number of ranks.

    The sizes of the `chosen` axes are not reset.
    """
    refuse([*unknown_values(config)])
    mesh = config.mesh
    if mesh.grid().size == ranks or None in (mesh.x, mesh.y, mesh.z):
        return config
    fit = ranks % (mesh.p * mesh.d * mesh.c * mesh.e) == 0
    kept = {axis: getattr(mesh, axis) for axis in {*chosen, *("pdce" if fit else "")}}
    mesh = MeshConfig(**kept, order=mesh.order, transport=mesh.transport)
    keys = "schedule", "chunks", "layers_per_stage", "zero", "shard", "context", "ulysses"
    freed = {} if fit else {key: getattr(ParallelConfig(), key) for key in keys}
    return replace(config, mesh=mesh, parallel=replace(config.parallel, **freed))


def with_free_schedule(config: Config, stored: Config) -> Config:
    """Reset the schedule, chunks and layers per stage of `config` if they no longer apply.

    A setting is reset to its default if the user has not changed it, but has changed a setting on
    which it depends: the number of stages or the schedule.
    """
    now, before = config.parallel, stored.parallel
    free: dict[str, Any] = {}
    if config.mesh.p != stored.mesh.p:
        if now.schedule == before.schedule == usual(stored.mesh.p):
            free["schedule"] = None
        if now.layers_per_stage == before.layers_per_stage:
            free["layers_per_stage"] = None
    if ("schedule" in free or now.schedule != before.schedule) and now.chunks == before.chunks:
        free["chunks"] = None
    return replace(config, parallel=replace(now, **free))


def continued(
    run: Path,
    config: Config,
    differs: _Differs | None = None,
    texts: Mapping[str, Any] | None = None,
) -> tuple[Config, list[str]]:
    """Return the configuration of a resumed run, and a log line for each changed setting or file.

    `differs(checkpoint)` returns the reason why a checkpoint does not fit the model, or `None`;
    the default is `mismatch`. `texts` describes the data files that the resumed run reads. Raises
    ValueError, before anything is changed, if the run cannot be resumed.
    """
    opened = _check(run, config, differs or partial(mismatch, config))
    done, before = opened.header["step"], config_of(opened)
    begun = before.train if done else config.train
    if done:
        refuse([*_other_share(before.data.validation, config.data.validation)])
    config = with_decay_steps(config, begun)
    said = [*changes(before, config), *rate_notes(begun, config.train, done)]
    earlier = opened.header.get("texts") or {}
    return config, [*said, *differences(earlier, texts or {}, config)]


def changes(stored: Config, config: Config) -> list[str]:
    """Return a line for each setting that differs from the run's `stored` settings.

    Settings without a stored value are omitted.
    """
    before, now = flat(stored), flat(config)
    usual, constants = stored.train.constants(), config.train.constants()
    for key in usual.keys() & constants.keys():
        before[f"train.{key}"], now[f"train.{key}"] = usual[key], constants[key]
    return [
        f"{key} was {_written(before[key])}, is {_written(now[key])}"
        for key in now
        if before[key] not in (None, now[key])
    ]


def _written(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _other_share(before: Any, now: Any) -> Iterator[str]:
    """Report an error if a resumed run changes the held-out fraction of its training text."""
    if before != now and float in (type(before), type(now)):
        was = f"it was {_written(before)}" if before else "nothing was held out"
        keep = f"leave it at {before}" if isinstance(before, float) else "use a separate text"
        yield (
            f"data.validation = {_written(now) or ''!r}: {was} so far, and a resumed run must "
            f"train on the same part of the text; {keep}, or start a new run"
        )


def _check(run: Path, config: Config, differs: _Differs) -> Checkpoint:
    """Return the newest checkpoint that appears intact, without reading its data files in full.

    Raises ValueError, before anything is changed, if no such checkpoint exists or if all steps
    have already been completed.
    """
    wrong = []
    for folder in steps_of(run / "checkpoints"):
        if not (problem := _attempt(lambda folder=folder: differs(Checkpoint(folder)))):
            break
        wrong.append(problem)
    else:
        of_another = []
        if wrong and all(problem.endswith(_OF_ANOTHER) for problem in wrong):
            of_another = [*_other_model_or_optimizer(Checkpoint(folder), config)]
        raise Problems(of_another or [*wrong, _NOTHING.format(run)])
    opened = Checkpoint(folder)
    if (done := opened.header["step"]) >= config.train.steps:
        how = "increase --train.steps"
        raise ValueError(f"--resume: the run has already completed {counted(done, 'step')}; {how}")
    return opened


def _other_model_or_optimizer(opened: Checkpoint, config: Config) -> Iterator[str]:
    """Report errors if a checkpoint has another model or lacks states of the optimizer."""
    stored = config_of(opened)
    for key, before, now in _changed_model(config, opened):
        yield (
            f"model.{key} = {now}: the run used {before} so far, and its checkpoints contain "
            f"this model; set it to {before}, or start a new run"
        )
    before, now = stored.train.optimizer, config.train.optimizer
    kept, wanted = (optimizer_of(each).STATES for each in (stored, config))
    if {*wanted} - {*kept}:
        yield (
            f"train.optimizer = {now}: the run used {before} so far, and its checkpoints do not "
            f"contain the state of {now}; set it to {before}, or start a new run"
        )


def with_decay_steps(config: Config, begun: TrainConfig | None = None) -> Config:
    """Resolve `train.decay_steps` of `config`.

    If the key is unset, its value comes from `begun`, the `[train]` section with which the run
    started, so that extending a run does not raise the learning rate again. Raises ValueError if
    the warm-up takes more steps than `train.decay_steps`.
    """
    steps = config.train.decay_steps or (begun or config.train).decaying()
    config = replace(config, train=replace(config.train, decay_steps=steps))
    refuse([*unknown_values(config)])
    return config


def rate_notes(begun: TrainConfig, train: TrainConfig, done: int) -> Iterator[str]:
    """Yield a line for each deviation of the learning rate from the original schedule.

    `begun` is the `[train]` section with which the run started, and `done` is the number of
    completed steps.
    """
    if train.curve() != begun.curve():
        rates = ", ".join(
            f"{learning_rate(train, step):.3e} instead of {learning_rate(begun, step):.3e} in "
            f"step {step}"
            for step in dict.fromkeys((done, train.steps - 1))
        )
        yield f"the learning rate schedule has changed: {rates}"
    if train.decay != "constant" and train.steps > train.decay_steps:
        first, rate = max(done, train.decay_steps), learning_rate(train, train.decay_steps)
        yield (
            f"the learning rate decays over train.decay_steps = {train.decay_steps}; from step "
            f"{first} it stays at its minimum, {rate:.3e}; to decay over all steps, set "
            f"--train.decay_steps {train.steps}"
        )


def resume(
    job: Job,
    run: Path,
    trainer: Trainer,
    say: Callable[[str], object],
    differs: _Differs | None = None,
    evaluator: Evaluator | None = None,
    texts: Mapping[str, Any] | None = None,
) -> int:
    """Restore the newest intact checkpoint of a run, and return the index of the next step.

    `say(line)` logs the restored checkpoint and the problems of newer checkpoints. `differs`
    returns an error message if a checkpoint does not fit the model. If the data files in `texts`
    are unchanged, the best evaluation loss so far is restored in `evaluator`.
    """
    opened, wrong = _newest(job, run, differs or partial(mismatch, trainer.config))
    before, opened = len(opened.workers), opened.for_worker(trainer.worker, trainer.workers)
    owned = bool(trainer.parameters.own_states) and _same_layout(opened, trainer.config)
    problem = _attempt(lambda: _take(opened, trainer, owned))
    if problems := _problems_of_all(job, problem):
        job.refuse(*problems)
    trainer.optimizer.steps = opened.header["updates"]
    trainer.scaling.restore(opened.header.get("loss_scale"))
    for line in wrong:
        say(f"resume: {line}")
    say(f"resume: step {opened.header['step']} follows checkpoint {opened.folder}")
    if before not in (1, trainer.workers):
        say(_MEAN.format(before))
    if trainer.parameters.own_states and not owned:
        say(_ANEW)
    elif not owned and any(kind in OWN_STATES for _, kind in opened.sources):
        say(_DROPPED)
    if evaluator:
        evaluator.best = job.from_root(
            lambda: restored(opened.header, config_of(opened), trainer.config, texts)
        )
    batches, position = trainer.feed.batches, opened.header.get("position") or {}
    if batches is not None and "sequences" in position:
        batches.go_on(opened.header["step"], position["sequences"], used_by_text(opened.header))
    return opened.header["step"]


def _take(opened: Checkpoint, trainer: Trainer, owned: bool) -> None:
    restore(opened, trainer.parameters, trainer.optimizer)
    if trainer.outer and not trainer.outer.is_in(opened.sources):
        trainer.outer.start()
    if owned:
        restore_own(opened, trainer.parameters)


def _same_layout(opened: Checkpoint, config: Config) -> bool:
    """Return True if the checkpoint was written with the mesh and data type of `config`.

    The settings of [parallel] in `_OF_LAYOUT` must also be the same.
    """
    before = config_of(opened)
    if before.train.dtype != config.train.dtype:
        return False
    return [*before.sizes().items()] == [*config.sizes().items()] and all(
        getattr(before.parallel, key) == getattr(config.parallel, key) for key in _OF_LAYOUT
    )


def _newest(job: Job, run: Path, differs: _Differs) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint of this model, and the errors in newer checkpoints.

    All ranks return the same checkpoint. If no checkpoint is intact, the job stops with an error.
    """
    wrong = []
    for folder in job.from_root(lambda: steps_of(run / "checkpoints")):
        opened = None

        def look(folder=folder):
            nonlocal opened
            opened = Checkpoint(folder)
            damage = opened.damage(job.rank, job.size)
            return damage or (differs(opened) if job.rank == 0 else None)

        problems = _problems_of_all(job, _attempt(look))
        if not problems:
            return opened, wrong
        wrong += problems
    job.refuse(*wrong, _NOTHING.format(run))


def _attempt(function: Callable[[], Any]) -> Any:
    """Return the result of `function`, or the message of its OSError or ValueError."""
    try:
        return function()
    except (OSError, ValueError) as error:
        return "; ".join(lines_of(error))


def _problems_of_all(job: Job, problem: str | None) -> list[str]:
    return [*dict.fromkeys(line for line in job.gather(problem) if line)]


def mismatch(config: Config, opened: Checkpoint) -> str | None:
    """Return an error message if a checkpoint does not fit a run's configuration, or `None`."""
    for key, stored, asked in _changed_model(config, opened):
        return f"{opened.folder} has model.{key} = {stored}, not {asked}: {_OF_ANOTHER}"
    before, model = config_of(opened), config.model
    shapes, stateless = shapes_of(model), stateless_of(model)
    kept = [spec for spec in optimizer_of(before).STATES if spec.name in kinds_of(opened)]
    trained = [item for item in shapes.items() if item[0] not in stateless]
    wanted = [
        spec for spec in optimizer_of(config).STATES if any(spec.of(*each) for each in trained)
    ]
    if lacking := {spec.name for spec in wanted if spec not in kept}:
        return f"{opened.folder} has no {' and '.join(sorted(lacking))} moments: {_OF_ANOTHER}"
    return next(inconsistencies(opened, shapes, stateless), None)


def _changed_model(config: Config, opened: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, stored value and new value of each changed key of [model].

    Keys that a resumed run may change are omitted.
    """
    before, model, may_change = config_of(opened).model, config.model, {*TRAINING_KEYS}
    # Before the first step, a shorter context is allowed if it changes no parameter.
    shorter = not opened.header["step"] and model.sequence < before.sequence
    if shorter and "embedding.position" not in shapes_of(model):
        may_change.add("sequence")
    stored, asked = (asdict(with_epsilon(each)) for each in (before, model))
    for key in stored:
        if stored[key] != asked[key] and key not in may_change:
            yield key, stored[key], asked[key]
