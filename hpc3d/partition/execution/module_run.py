"""Train an unmodified torch module on the pipeline stages of a plan.

    mpirun -np N python -m hpc3d.partition run PLAN.json --steps 100 --torch.inputs data:batch
    mpirun -np N python -m hpc3d.partition run --resume RUN_DIR [PLAN.json]

N is the number of ranks of the plan. The module must return its loss as a mean over the samples;
other outputs are ignored. The options are keys of an input file (docs/configuration.md): all keys
of [train], [checkpoint], [guard], [trace], [run] and [torch], and the keys seed, name,
parallel.bucket_mb, parallel.overlap, parallel.zero, parallel.offload and parallel.keep_dtype.
--steps and --verify are abbreviations of --train.steps and --torch.verify. The plan determines all
other keys.

Before the first step, rank 0 runs the unpartitioned module on the samples of two microbatches and
compares the loss and the gradients with those of the captured program. If they differ, the run
stops. Use --verify forward to compare only the losses if the gradients of the module do not fit in
the memory of one rank. With --verify off, the run starts even if results differ, and rank 0
compares only the largest prefix of the module that fits in its memory.

With --train.eval_every N and --torch.validation MODULE:FUNCTION, the module is evaluated every N
steps in evaluation mode. The function returns the inputs of a batch, given the batch number.

With --resume, the run in RUN_DIR continues with its own plan, or with another plan of the same
model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch

from hpc3d.checkpoints.block_slices import stored_shape
from hpc3d.checkpoints.inspect import inconsistencies
from hpc3d.checkpoints.resume import (
    config_of_run,
    continued,
    resume,
    run_to_resume,
    with_decay_steps,
)
from hpc3d.checkpoints.saver import saver_of
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.comm.cartesian import build_stages
from hpc3d.config import load
from hpc3d.config.backend_rules import wrong_backend
from hpc3d.config.input_file import Config, MeshConfig
from hpc3d.config.parallel_rules import wrong_offload
from hpc3d.config.resolve import refuse
from hpc3d.config.rules import unknown_values
from hpc3d.config.wrong_values import reported
from hpc3d.console.command_line import positional
from hpc3d.console.exit_codes import BadData
from hpc3d.console.sanitize import counted
from hpc3d.model.parameters import no_matrix
from hpc3d.partition import plan_file
from hpc3d.partition.capture import (
    Captured,
    captured_of,
    shape_of,
    updated_by_microbatches,
)
from hpc3d.partition.capturing.tracing import MEMORY_FRACTION
from hpc3d.partition.capturing.user_code import described
from hpc3d.partition.execution.evaluation_model import evaluation_lines, evaluation_model
from hpc3d.partition.execution.module_evaluator import ModuleEvaluator
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.predicted_traffic import (
    border_traffic,
    sum_traffic,
    tensor_traffic,
    traffic_lines,
)
from hpc3d.partition.execution.sample_batches import flat_inputs, rows_of
from hpc3d.partition.execution.staged_model import StagedModel, staged_model
from hpc3d.partition.execution.torch_device import device_names, torch_hardware, use_device
from hpc3d.partition.execution.torch_weights import stored_tensors, values_in
from hpc3d.partition.execution.verification import verified, verified_prefix
from hpc3d.partition.factory import converted, function_at, made_with_data
from hpc3d.partition.plan_file import SavedPlan
from hpc3d.pipeline.program import program_of
from hpc3d.pipeline.schedule import DEFAULT, FOR_PARTITIONS, find
from hpc3d.runtime import host_memory
from hpc3d.runtime.metrics_file import sinks_of
from hpc3d.runtime.stop_request import Stop
from hpc3d.training import run_folder
from hpc3d.training.footprint import unwritable
from hpc3d.training.log import offload_lines
from hpc3d.training.optimizers.catalog import optimizer_of
from hpc3d.training.run_loop import RunningJob, RunPlan, equipped, trained

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

_OF_RUN = ("train.", "checkpoint.", "guard.", "trace.", "run.")
_OF_RUN += (
    "torch.inputs",
    "torch.validation",
    "torch.verify",
    "seed",
    "name",
    "parallel.bucket_mb",
    "parallel.overlap",
    "parallel.zero",
    "parallel.offload",
    "parallel.keep_dtype",
    "mesh.transport",
)
_WITHOUT = "train.cuda_graph", "guard.abft_every"
# Options of the planner, by the key of an input file that a plan determines
_PLANNED = {
    "train.batch": "--batch",
    "train.dtype": "--dtype",
    "mesh.p": "--replicas",
    "mesh.d": "--replicas",
    "parallel.microbatches": "--microbatches",
    "parallel.schedule": "--schedule",
    "parallel.chunks": "--schedule interleaved",
    "parallel.recompute": "--recompute",
}
_ABBREVIATED = "train.steps", "torch.verify"
_USAGE = "use partition run PLAN.json --section.key VALUE ..., or partition run --resume RUN_DIR"


class RunRequest(NamedTuple):
    """Parsed command line.

    `words` contains the configuration options, and `resumed` is the folder of the run to resume.
    """

    plan: SavedPlan
    words: list[str]
    resumed: Path | None


class _Opened(NamedTuple):
    """Plan of the run, and the open lock file of its folder. Only rank 0 creates this object."""

    plan: RunPlan
    lock: TextIO


class _Source(NamedTuple):
    """Initial weights, and the inputs of each step. Only rank 0 creates this object.

    `lines` describes the verification of the captured module. If the run has evaluations,
    `evaluated` contains the weights in evaluation mode, and `validation` contains the inputs of
    the evaluations.
    """

    values: dict[str, torch.Tensor]
    batches: StepInputs
    lines: list[str]
    evaluated: dict[str, torch.Tensor]
    validation: StepInputs | None


def run(job: Job, words: list[str]) -> None:
    """Parse the command line, and execute all training steps of this rank."""
    if {"-h", "--help"} & {*words}:
        job.from_root(lambda: print(__doc__, flush=True))
        return
    asked = job.from_root(lambda: asked_for(words))
    if job.size != asked.plan.ranks:
        meant = counted(asked.plan.ranks, "rank")
        job.refuse(f"the plan is for {meant}, but {job.size} were started; start {meant}")
    job.on_root(lambda: _check(asked))
    torch.set_num_threads(1)
    model = job.on_all_ranks(lambda: _model(asked.plan))
    opened = job.on_root(lambda: _prepare(asked, model))
    plan = job.from_root(lambda: opened.plan)
    evaluated = job.on_all_ranks(lambda: _evaluated(asked.plan, plan.config, model))
    stop = Stop(job, plan.folder, plan.config.run.signal, plan.config.train.max_minutes)
    with opened.lock if opened else nullcontext():
        trained(job, plan, _begin(job, plan, asked.plan, (model, evaluated)), stop)


def asked_for(words: list[str]) -> RunRequest:
    """Parse the command line on rank 0; raise ValueError if it is invalid."""
    words = list(words)
    resumed = run_to_resume(words)
    path = positional(words) or (resumed and resumed / "plan.json")
    if not path:
        raise ValueError(f"the plan file is missing; {_USAGE}")
    for key in _ABBREVIATED:
        short = key.rpartition(".")[2]
        words = [re.sub(f"^--{short}(?==|$)", f"--{key}", word) for word in words]
    for option, _ in load.options(words):
        key = option.removeprefix("--")
        if remedy := _PLANNED.get(key):
            raise ValueError(f"{option}: the plan sets this key; make a plan with {remedy}")
        if not key.startswith(_OF_RUN) or key in _WITHOUT:
            raise ValueError(
                f"{option}: not supported for torch modules; remove the option. Allowed keys and "
                f"prefixes: {', '.join(_OF_RUN)}"
            )
    return RunRequest(plan_file.load(path), words, resumed)


def _check(asked):
    """Raise ValueError on rank 0 if the configuration is invalid.

    Capturing the module may take minutes, so errors are reported before it. If the plan does not
    convert the module, its data type is not known yet, and the default is assumed.
    """
    config = configuration(asked, asked.plan.dtype or Config().train.dtype)
    sinks_of(config.run.metrics_hook, config.run.trackers)
    program_of(config)
    evaluates = config.train.eval_every
    for name in (config.torch.inputs, evaluates and config.torch.validation):
        if name:
            function_at(name)


def _model(plan):
    captured = captured_of(plan.model, plan.dtype)
    split = find(plan.schedule).splits_backward
    pieces = plan.pieces(captured)
    how = {"split": split, "ways": plan.tensor}
    return staged_model(captured, pieces, plan.replicas, plan.recompute, **how)


def _evaluated(plan, config, model):
    """Return the model in evaluation mode, or `None` if the run has no evaluations."""
    if not config.train.eval_every:
        return None
    return evaluation_model(plan.model, model, plan.pieces(model.captured), plan.dtype)


def _prepare(asked, model):
    """Resolve the configuration on rank 0, and create the run folder or reopen an existing one."""
    config, resumed, changed = configuration(asked, model.dtype), asked.resumed, []
    with ExitStack() as refused:
        if resumed:
            lock = refused.enter_context(run_folder.claim(resumed))
            config, changed = continued(resumed, config, partial(mismatch, model))
            where = run_folder.reopen(resumed, load.to_toml(config))
        else:
            config = with_decay_steps(config)
            where = run_folder.create(config, load.to_toml(config))
            lock = refused.enter_context(run_folder.claim(where))
        run_folder.write_text(where / "plan.json", asked.plan.text())
        refused.pop_all()  # keep the lock open
    plan = RunPlan(config, resumed, where, run_folder.git_revision(), changed)
    return _Opened(plan, lock)


def configuration(asked: RunRequest, dtype: str) -> Config:
    """On rank 0, build the run configuration from the plan and the given options.

    `dtype` is the data type of the parameters.
    """
    plan, resumed = asked.plan, asked.resumed
    config = config_of_run(resumed, asked.words) if resumed else load.load(None, asked.words)
    mesh = MeshConfig(len(plan.replicas), max(plan.replicas), x=plan.tensor, y=1, z=1)
    parallel = replace(
        config.parallel,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        chunks=plan.chunks,
        zero=config.parallel.zero or plan.zero,
        offload=config.parallel.offload or (*(plan.offload or ()),),
    )
    config = replace(
        config,
        name="module" if config.name == Config().name else config.name,
        mesh=replace(mesh, transport=config.mesh.transport),
        parallel=parallel,
        torch=replace(config.torch, factory=plan.model),
        train=replace(config.train, batch=plan.batch, dtype=dtype),
    )
    refuse([*_wrong(plan), *_wrong_keys(config)])
    return config


def _wrong_keys(config: Config) -> Iterator[str]:
    """Report invalid values of the keys that the user sets."""
    zero, offload = config.parallel.zero, config.parallel.offload
    rules = unknown_values(config), wrong_offload(config), unwritable(config)
    yield from reported(*rules, wrong_backend(config))
    if "parameters" in offload:
        yield (
            f"parallel.offload = {[*offload]}: parameters of torch modules cannot be offloaded; "
            "use optimizer and activations, or make a plan with more --ranks"
        )
    if zero > 1:
        yield f"parallel.zero = {zero}: not supported for torch modules; use 0 or 1"
    if (ways := config.mesh.x) > 1:
        where = f"not supported with {ways} tensor-parallel ranks"
        if config.train.backend == "cupy":
            yield f"train.backend = cupy: {where}; use numpy, or make a plan with --tensor 1"
        if zero == 1:
            yield f"parallel.zero = 1: {where}; use 0, or make a plan with --tensor 1"
        if optimizer_of(config).WHOLE_MATRICES is not no_matrix:
            yield (
                f"train.optimizer = {config.train.optimizer}: {where}; use adamw, or make a plan "
                "with --tensor 1"
            )


def _wrong(plan: SavedPlan) -> Iterator[str]:
    schedule, rows = find(plan.schedule), plan.batch // plan.microbatches
    if schedule.asynchronous:
        yield (
            f"schedule {plan.schedule}: not supported for torch modules; make a plan with "
            f"--schedule {DEFAULT}"
        )
    if schedule.v_shaped:
        split = " or ".join(each.name for each in FOR_PARTITIONS if each.splits_backward)
        yield (
            f"schedule {plan.schedule}: not supported for torch modules, because its chunks are "
            f"placed in a V shape, but a plan places chunk n on stage n mod S; make a plan with "
            f"--schedule {split}"
        )
    if max(plan.replicas) > rows:
        samples = counted(rows, "sample")
        yield (
            f"a microbatch of {samples} is too small for {max(plan.replicas)} replicas; make a "
            "plan with smaller --replicas or --microbatches"
        )
    if len({*plan.replicas}) > 1 and plan.batch % plan.microbatches:
        yield (
            f"a batch of {counted(plan.batch, 'sample')} must be divisible by {plan.microbatches} "
            "microbatches, because the stages have different numbers of replicas; make a plan "
            "with another --batch or --microbatches"
        )


def _source(
    plan: SavedPlan, config: Config, model: StagedModel, evaluated: StagedModel | None
) -> _Source:
    """On rank 0, create and verify the module; return its weights and the inputs of each step."""
    module, inputs = made_with_data(plan.model, config.seed, plan.dtype)
    values, verify = dict(values_in(module, model.captured)), _comparison(config.torch.verify)
    given = function_at(config.torch.inputs) if config.torch.inputs else lambda step: inputs
    batches = StepInputs(model.captured, given, plan.batch, dtype=plan.dtype)
    of_evaluation, validation = {}, None
    replicas = range(max(plan.replicas))
    split = [rows_of(plan.batch, plan.microbatches, len(replicas), each) for each in replicas]
    shares = [rows for micro in zip(*split, strict=True) for rows in micro][:2]
    lines = verify(module, model.captured, batches(0), shares)
    if evaluated:
        captured, given = evaluated.captured, function_at(config.torch.validation)
        validation = StepInputs(captured, given, plan.batch, config.train.eval_batches, plan.dtype)
        unchecked = validation.check()
        of_evaluation = dict(values_in(module, captured))
        lines += evaluation_lines(evaluated, model)
        lines += verify(module, captured, validation(0), shares, training=False)
        lines += unchecked
    return _Source(values, batches, lines, of_evaluation, validation)


def _comparison(verify):
    """Return the function that verifies a captured module, for a value of torch.verify."""
    if verify == "off":
        return partial(verified_prefix, MEMORY_FRACTION * host_memory.total())
    return partial(verified, gradients=verify == "on")


def _begin(
    job: Job,
    plan: RunPlan,
    saved: SavedPlan,
    models: tuple[StagedModel, StagedModel | None],
) -> RunningJob:
    """Build the mesh and the trainer; `models` are the module in training and in evaluation."""
    config, (model, evaluated) = plan.config, models
    source = job.on_root(lambda: _source(saved, config, model, evaluated))
    hardware = torch_hardware(job, config)._replace(homes=job.homes())
    rows = config.train.batch // config.parallel.microbatches
    mesh, line = build_stages(
        model.replicas, rows, hardware.transport, hardware.device, model.ways
    )
    if hardware.device:
        use_device(job, hardware.device, mesh.pool, config.train.tf32)
    names = device_names(job, hardware.device)
    layout = [*_layout(config, model), *other_device(saved, names)]
    layout += source.lines if source else ()
    mesh, watchdog, log, clock = equipped(job, plan, mesh, hardware, layout)
    batches = source and source.batches
    trainer = ModuleTrainer(mesh, config, model, line, batches, program_of(config), clock)
    trainer.fill(source.values if source else {})
    start, evaluator = 0, None
    if evaluated:
        evaluator = ModuleEvaluator(trainer, evaluated, source and source.validation)
    if plan.resumed:
        differs = partial(mismatch, model)
        start = resume(job, plan.folder, trainer, log.say, differs, evaluator)
    if evaluator:
        evaluator.fill(source.evaluated if source else {})
    saver = saver_of(job, plan, trainer, batches, log, evaluator)
    return RunningJob(trainer, saver, watchdog, log, batches, start, evaluator)


def _layout(config: Config, model: StagedModel) -> Iterator[str]:
    counts = [len(program.module.graph.nodes) for program in model.programs]
    replicas = " ".join(map(str, model.replicas))
    yield f"{config.torch.factory}: operations per model chunk {' '.join(map(str, counts))}"
    yield (
        f"schedule {config.parallel.schedule}, microbatches {config.parallel.microbatches}, "
        f"replicas per stage {replicas}; ZeRO {config.parallel.zero}"
    )
    yield from offload_lines(config)
    if config.parallel.keep_dtype:
        yield f"saved activations in {config.parallel.keep_dtype}"
    if model.ways > 1:
        state = model.captured.program.state_dict
        split = sum(state[name].numel() for name in model.splits)
        total = sum(state[name].numel() for name in stored_tensors(model.captured)["shapes"])
        yield (
            f"{model.ways} tensor-parallel ranks per replica: {split / total:.0%} of the elements "
            f"of parameters and buffers are split, in {counted(len(model.splits), 'tensor')}"
        )
    yield f"loss: {model.captured.loss.text}"
    if config.torch.validation and not config.train.eval_every:
        yield "torch.validation is not evaluated, because train.eval_every = 0"
    for name in updated_by_microbatches(model.captured):
        yield f"buffer {name}: updated by each microbatch, not once per step as in torch"
    batch, micros = config.train.batch, config.parallel.microbatches
    borders, sums = border_traffic(model, batch, micros), sum_traffic(model)
    yield from traffic_lines(borders, sums, tensor_traffic(model, batch, micros))


def other_device(plan: SavedPlan, device: str) -> Iterator[str]:
    """Yield a line for the log if a plan is based on measurements on another kind of device."""
    measured = plan.predicted.get("device")
    if measured not in (None, device):
        yield (
            f"the plan is based on a profile of {measured!s:.80}, but the run uses {device}, so "
            "the predicted times are wrong; run partition profile with the same train.backend as "
            "the run, and make a new plan"
        )


class StepInputs:
    """Loader of a module's inputs; `given(step)` returns a step's inputs (`samples` samples).

    Floating-point inputs are converted to `dtype` if it is given. For an evaluation, `count` is
    the number of batches, and `step` is the number of a batch.
    """

    def __init__(
        self,
        captured: Captured,
        given: Callable[[int], tuple | dict],
        samples: int,
        count: int = 0,
        dtype: str | None = None,
    ) -> None:
        self.captured, self.given, self.samples = captured, given, samples
        self.dtype, self.count = dtype, count

    def __call__(self, step: int) -> list[Any]:
        """Return the inputs of a step as a flat list in the order of the captured program."""
        at = f"validation batch {step}" if self.count else f"step {step}"
        try:
            given = converted(self.given(step), self.dtype)
        except (Exception, SystemExit) as error:
            raise BadData(f"{at}: the inputs function raised {described(error)}") from error
        try:
            flat = flat_inputs(self.captured, given)
        except ValueError as error:
            raise BadData(f"{at}: {error}") from None
        for node, value in zip(self.captured.inputs, flat, strict=True):
            if isinstance(like := node.meta["val"], torch.Tensor):
                if problem := _problem(value, like.dtype, shape_of(like, self.samples)):
                    raise BadData(f"{at}: input {node.name} is {problem}")
            elif hasattr(value, "shape") or value != like:
                raise BadData(
                    f"{at}: input {node.name} is {_shown(value)}, but the plan is for "
                    f"{_shown(like)}; pass values that change from step to step as tensors"
                )
        return flat

    def check(self, seconds: float = 10.0) -> list[str]:
        """Check the inputs of an evaluation; return a line if some batches are not checked.

        The first and the last batch are always checked. The other batches are checked until about
        `seconds` have passed. Raises BadData if a batch is invalid.
        """
        start = monotonic()
        for done, number in enumerate(dict.fromkeys((0, self.count - 1, *range(self.count)))):
            if done > 1 and monotonic() - start > seconds:
                return [
                    f"validation batches: {done} of {self.count} checked before the first step"
                ]
            self(number)
        return []

    def position(self, done: int) -> dict[str, int]:
        return {"sequences": done * self.samples}

    def epochs(self, done: int) -> list[float]:
        return []

    def go_on(self, done: int, sequences: int, position: Mapping[str, int] | None = None) -> None:
        """Do nothing: inputs depend only on the step number, so there is no state to restore."""


def _problem(value: Any, dtype: torch.dtype, shape: list[int]) -> str:
    """Describe an input that is not a dense CPU tensor with this type and shape, or return ""."""
    if not isinstance(value, torch.Tensor):
        return f"{_shown(value)}, not a tensor; convert it with torch.as_tensor"
    found, wanted = _described(value.dtype, [*value.shape]), _described(dtype, shape)
    if found != wanted:
        return f"{found}, not {wanted}"
    if value.layout is not torch.strided:
        return f"{str(value.layout).removeprefix('torch.')}; convert it with to_dense()"
    if value.device.type != "cpu":
        return f"on the device {value.device}; return a tensor on the CPU"
    return ""


def _shown(value: Any) -> str:
    """Describe an input on one line."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        kind = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
        return f"{kind} {_described(value.dtype, [*value.shape])}"
    return " ".join(f"{value!s:.80}".split())


def _described(dtype: Any, shape: list[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def mismatch(model: StagedModel, opened: Checkpoint) -> str | None:
    """Return an error message if a checkpoint does not match the module, otherwise `None`."""
    tensors = stored_tensors(model.captured)
    shapes = {name: stored_shape(dims) for name, dims in tensors["shapes"].items()}
    return next(inconsistencies(opened, shapes, tensors["frozen"]), None)
