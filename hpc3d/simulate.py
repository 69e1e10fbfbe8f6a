"""Predict a training step on a machine, or simulate a pipeline schedule.

python -m hpc3d.simulate gpt-4d-64 --machine h100
python -m hpc3d.simulate schedule --name 1f1b --stages 4 --microbatches 8
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hpc3d.config.argument_types import integer, number_of_ranks, real
from hpc3d.config.package_data import (
    DEFAULT_MACHINE,
    default_machine,
    input_of,
    machine_in_words,
    refuse_model,
)
from hpc3d.console.command_line import Parser, readable_time, run
from hpc3d.console.sanitize import Problems, counted, sanitized
from hpc3d.pipeline.csv_schedule import to_csv
from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.ideal_run import MOST_SIMULATED, TIMES, bounds_of_times, ideal_run, is_time
from hpc3d.pipeline.schedule import SCHEDULES, SEARCH
from hpc3d.runtime.optional_packages import need

_STEP = """\
Predict a training step on a machine. The training program runs on arrays that have a shape and a
type but no data, with one rank per pipeline stage. A simulated clock advances by the time that
each matrix product, kernel and communication call takes on the machine. The number of ranks is
arbitrary, and the command runs on any machine.

The command prints the step time, the pipeline bubble, the memory of each stage by kind of data,
the time, FLOPs and bytes of each sub-block of the model and phase of the step, and the bytes that
a rank receives along each axis. --out writes the events of all ranks as a trace, which
`python -m hpc3d.report` reads like a measured one. If RUN_DIR is a run folder, the prediction is
added to the trace of this run, and the report of the run shows both.

Keys of the input file can be given as options (--mesh.x 4). `python -m hpc3d.simulate schedule`
simulates only a pipeline schedule."""

_SCHEDULE = """\
Simulate a pipeline schedule with given times. A stage starts a pass when its previous pass has
ended and its input has arrived. A message takes --comm seconds and never waits for other messages.

The command prints a diagram, the makespan, and the pipeline bubble (cost - work) / cost, as
defined in Zero Bubble (arXiv:2401.10241). For each stage, it prints the peak numbers of
microbatches in flight and of microbatches whose weight gradient (W) is pending. In the diagram, F
is a forward pass and B a backward pass. If the schedule splits the backward pass, B computes the
input gradient and W the weight gradient. Lowercase letters mark passes of model chunk 1.

With --name search, the command searches for a schedule with one model chunk per stage for the
given times, such that each stage has saved data of at most --memory microbatches. It prints a
lower bound on the makespan of all such schedules, and the proven gap: makespan / bound - 1."""

# Columns of the table of sections: the JSON key, the heading, the factor and the width.
_SECTION = (
    ("computation_s", "computation", 1e3, 12),
    ("communication_s", "exposed", 1e3, 10),
    ("idle_s", "idle [ms]", 1e3, 12),
    ("flop", "TFLOP", 1e-12, 10),
    ("bytes", "received", 1e-6, 11),
    ("saved_bytes", "saved [MB]", 1e-6, 13),
)
# Keys of an input file in messages about schedules, and the options of `simulate schedule`.
_OPTIONS = {
    "mesh.p": "--stages",
    "parallel.schedule": "--name",
    "parallel.microbatches": "--microbatches",
    "parallel.chunks": "--chunks",
    "train.steps": "--steps",
}
_SCHEDULE_JSON = """\
print one JSON object on the last line, with the keys name, stages, microbatches, chunks, steps,
the given times, makespan [s], bubble, and lists with in_flight and weight_inputs of each stage.
The bubble is the pipeline bubble, as a fraction. With --name search, the keys bound [s] and gap
are added"""

_STEP_JSON = """\
print one JSON object on the last line, with the keys machine, ranks, step_time_s, tokens_per_s,
bubble, communication (exposed, as a fraction of the step time), flop, mfu, hfu, memory (stages,
worst, total, fits) [B], bytes (calls and received bytes of a rank in stage 0, by axis and
operation), time (computation, exposed communication and idle time of the busiest stage) and
sections (for each stage, the same times, FLOPs, received bytes and saved bytes per microbatch, by
part of the model and phase). The bubble is the pipeline bubble of the glossary, as a fraction. If
train.eval_every is set, evaluation_batch_s is the time in seconds per evaluation batch, and
evaluation_peak_bytes the peak memory of a rank during an evaluation. For a mixture of experts,
mixture contains parameters, active, blocks, group, slots and capacity. If the machine file lists
the errors of published steps with a similar layout, interval contains layout, steps, low_s and
high_s. For GPUs, cuda_graph states what the CUDA graph of the step contains, or why it has none.
With local updates, step_time_s is a mean. The key agreement contains every, the interval in steps,
sync, and the step time step_s and the bytes of a step in which the workers agree. A stale
agreement overlaps with as many steps as every specifies. In this case, step_s is the time of the
last of these steps, and bytes covers all of them"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid input."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["schedule"]:
        options = schedule_parser().parse_args(words[1:])
        return run("simulate", lambda: _schedule(options))
    options, overrides = parser().parse_known_args(words)
    return run("simulate", lambda: _step(options, overrides))


def parser() -> Parser:
    """Return the command-line parser of `simulate INPUT.toml`."""
    usage = "%(prog)s INPUT.toml|RUN_DIR [--machine NAME|FILE] [options] [--section.key value ...]"
    parser = Parser("simulate", _STEP, usage=usage)
    add = parser.add_argument
    add("input", type=Path, metavar="INPUT.toml|RUN_DIR", help="input file or run folder")
    text = f"machine in inputs/machines, or a machine file (default: {DEFAULT_MACHINE})"
    add("--machine", metavar="NAME|FILE", help=text)
    text = "number of ranks (default: product of the sizes in [mesh], if the input sets x, y or z)"
    add("--ranks", type=number_of_ranks, metavar="N", help=text)
    add("--out", type=Path, metavar="DIR", help="new folder for the simulated trace, trace.h5")
    add("--json", action="store_true", help=_STEP_JSON)
    return parser


def _step(options, overrides):
    from hpc3d.predict.predicted_step import predicted_step

    folder, problems = options.input if options.input.is_dir() else None, []
    if folder and (folder / "checkpoints").is_dir() and not any(folder.glob("trace*")):
        # An imported run that has not been trained yet has no layout.
        folder, options.input = None, input_of(folder)
    if folder and not (folder / "config.toml").is_file():
        refuse_model(folder)
        problems.append(
            f"{folder}: this folder has no config.toml; specify an input file, or a run folder "
            "with a trace"
        )
    elif folder and (overrides or options.ranks):
        changes = [*overrides, *(["--ranks", str(options.ranks)] if options.ranks else [])]
        source = [f"{folder}/config.toml", "--machine", options.machine or DEFAULT_MACHINE]
        command = shlex.join(["python", "-m", "hpc3d.simulate", *source, *changes])
        problems.append(
            f"{folder} is a run, whose settings are fixed; leave out {' '.join(changes)}, "
            f"or predict other settings with {command}"
        )
    if options.out and options.out.exists():
        problems.append(f"--out {options.out} already exists; choose a new folder")
    if problems:
        raise Problems(problems)
    source = folder / "config.toml" if folder else options.input
    machine = options.machine or default_machine()
    step = predicted_step(source, overrides, machine, options.ranks, bool(folder))
    kept = []
    if folder:
        kept.append(_keep_beside(folder, step.runs, step.summary))
    if options.out:
        kept.append(f"written to {step.keep(options.out)}")
    _print_step(step.config, step.summary, options.machine)
    for line in kept:
        print(f"\n{sanitized(line)}")
    if options.json:
        print(json.dumps(step.summary))


def _batches(config, seconds):
    """Describe the evaluations of a run: number of batches, time, and interval in steps."""
    train, texts = config.train, max(1, len(config.data.validation_texts()))
    often = f"every {train.eval_every} steps" if train.eval_every > 1 else "every step"
    if not train.eval_batches:
        return f"all batches of the validation text{'s'[: texts > 1]}, {often}"
    most = train.eval_batches * texts
    return f"at most {most}, {readable_time(most * seconds)}, {often}"


def _keep_beside(folder, runs, found):
    from hpc3d.predict.simulation.write_trace import prediction
    from hpc3d.trace.annotations import write_prediction

    trace = folder / "trace.h5"
    write_prediction(trace, prediction(runs, found), found["machine"])
    return f"the prediction was added to {trace}; to compare, run python -m hpc3d.report {folder}"


def _print_step(config, found, machine):
    from hpc3d.predict.assumptions import lines
    from hpc3d.predict.error_intervals import described

    sizes = " ".join(f"{axis}={size}" for axis, size in config.sizes().items() if size > 1)
    ranks = counted(found["ranks"], "rank")
    named = machine_in_words(found["machine"], machine)
    print(f"{ranks} of {named}: {sizes or 'serial'}, ", end="")
    print(sanitized(f"{config.parallel.way}, schedule {config.parallel.schedule}"))
    print()
    for line in lines(config):
        print(line)
    step = readable_time(found["step_time_s"])
    print(f"step            {step}, {found['tokens_per_s']:.4g} tokens/s")
    if agreement := found.get("agreement"):
        print(f"agreement       {_agreement(agreement)}")
    print(f"MFU, HFU        {found['mfu']:.1%}, {found['hfu']:.1%}")
    if config.mesh.p > 1:
        print(f"pipeline bubble {found['bubble']:.2%}")
    waits = "of the step time, exposed (without waiting for other stages)"
    print(f"communication   {found['communication']:.1%} {waits}")
    print(f"time            {_sum_of_times(found['time'])}")
    if graph := found.get("cuda_graph"):
        print(f"CUDA graph      {graph}")
    if seconds := found.get("evaluation_batch_s"):
        peak = found["evaluation_peak_bytes"]
        print(
            f"evaluation      {readable_time(seconds)} per batch, peak of {peak / 1e6:.3f} MB; "
            f"{_batches(config, seconds)}"
        )
    if around := found.get("interval"):
        print(f"interval        {described(around, found['step_time_s'])}")
    print()
    _print_memory(found["memory"])
    _print_sections(found["sections"][found["time"]["stage"]])
    print("\naxis    operation         calls     received [MB]")
    print("(per step of one rank of the first stage; axis world: calls over all ranks)")
    for axis, ops in found["bytes"].items():
        for op, each in ops.items():
            print(f"{axis:7s} {op:15s} {each['calls']:7d} {each['bytes'] / 1e6:17.3f}")


def _agreement(agreement):
    """Describe the agreements of the workers: interval, step time and received bytes."""
    from hpc3d.comm.mesh import COPIES

    every, seconds = agreement["every"], readable_time(agreement["step_s"])
    stale = agreement["sync"] == "stale"
    received = sum(each["bytes"] for each in agreement["bytes"].get(COPIES, {}).values())
    line = f"{seconds}, in which a rank receives {received / 1e6:.3f} MB from other workers"
    if every == 1:
        return f"every step{', stale' * stale}: {line}"
    if stale:
        line = f"overlaps with {every} steps, in which a rank receives {received / 1e6:.3f} MB"
        return f"{line} from other workers; the last one takes {seconds}; the step time is a mean"
    line = f"a step in {every}: {line}; the step time, MFU and communication are means"
    return f"{line}; all other values are for a step without an agreement"


def _sum_of_times(time):
    work, calls, idle = (readable_time(time[key]) for key, *_ in _SECTION[:3])
    return (
        f"{work} computation + {calls} exposed communication + {idle} idle (stage {time['stage']})"
    )


def _print_sections(rows):
    titles = "".join(f"{title:>{width}s}" for _, title, _, width in _SECTION)
    print(f"\npart       phase   {titles}")
    print("(of a rank of the busiest stage per step; saved: by the forward pass of a microbatch)")
    total = {key: sum(row[key] for row in rows) for key, *_ in _SECTION}
    for row in [*rows, {"part": "total", "phase": "", **total}]:
        cells = "".join(f"{row[key] * factor:{width}.3f}" for key, _, factor, width in _SECTION)
        print(f"{row['part']:11s}{row['phase']:8s}{cells}")


def _print_memory(memory):
    kinds = [*memory["stages"][0]]
    print("stage " + "".join(f"{kind:>14s}" for kind in kinds) + "   [MB] at the peak")
    print("(embeddings count as parameters, and logits as activations and communication buffers;")
    print(" the kinds peak at different times, so their sum can exceed the peak of all)")
    for stage, peaks in enumerate(memory["stages"]):
        print(f"{stage:5d} " + "".join(f"{peaks[kind] / 1e6:14.3f}" for kind in kinds))
    fits = "fits" if memory["fits"] else "does not fit; use more stages, ZeRO or recompute"
    print(f"all ranks {memory['total'] / 1e9:.3f} GB; {fits}")


def schedule_parser() -> Parser:
    """Return the command-line parser of `simulate schedule`."""
    parser = Parser("simulate schedule", _SCHEDULE)
    add = parser.add_argument
    add("--name", required=True, help=f"schedule: {', '.join(SCHEDULES)}, csv:FILE or {SEARCH}")
    add("--stages", required=True, type=_size, metavar="P", help="number of stages")
    text = "number of microbatches per step"
    add("--microbatches", required=True, type=_size, metavar="M", help=text)
    add("--forward", type=_times, default=1.0, metavar="S", help=_time("the forward pass"))
    add("--backward", type=_times, default=1.0, metavar="S", help=_time("the input gradient"))
    add("--weight", type=_times, default=1.0, metavar="S", help=_time("the weight gradient"))
    text = "time per message in s (default: 0), or a list with one time per chunk boundary: 1,2,3"
    add("--comm", type=_times, default=0.0, metavar="S", help=text)
    text = "model chunks per stage (default: determined by the schedule, or 2)"
    add("--chunks", type=_size, metavar="V", help=text)
    text = "number of training steps, for an asynchronous schedule (default: 1)"
    add("--steps", type=_size, default=1, metavar="N", help=text)
    text = (
        "for --name search: maximum number of microbatches with saved data on a stage, from the "
        "start of F to the end of W (default: no limit)"
    )
    add("--memory", type=_size, metavar="N", help=text)
    add("--png", metavar="FILE", help="draw the diagram as a PNG file")
    text = "write the schedule to a CSV file, which --name csv:FILE reads"
    add("--csv", metavar="FILE", help=text)
    add("--json", action="store_true", help=_SCHEDULE_JSON)
    return parser


_size = integer(0, MOST_SIMULATED)  # each schedule checks its own minimum sizes
_seconds = real(is_time, bounds_of_times())


def _time(what):
    return (
        f"time in s of {what} of a stage per microbatch, for all its chunks (default: 1), or a "
        "list with one time per model chunk, such as 8,13,19,20"
    )


def _times(text):
    values = [_seconds(each) for each in text.split(",")]
    return values if len(values) > 1 else values[0]


def _schedule(options):
    if options.png:
        need("--png", "matplotlib")
    sizes = options.stages, options.microbatches, options.chunks, options.steps
    times = {name: getattr(options, name) for name in TIMES}
    try:
        simulated = ideal_run(options.name, *sizes, times, options.memory)
    except ValueError as error:
        raise ValueError(_with_options(str(error))) from None
    if options.csv:
        _write_csv(options, simulated.passes, simulated.placement)
    found = simulated.found()
    _print(simulated, found)
    if options.png:
        from hpc3d.analyze.metrics.pass_spans import spans
        from hpc3d.analyze.report.gantt import draw_gantt

        draw_gantt([(simulated.title, spans(simulated.rows))], options.png)
    if options.json:
        print(json.dumps(found))


def _with_options(message):
    """Replace the keys of an input file in a message by options of `simulate schedule`."""
    for key, option in _OPTIONS.items():
        message = message.replace(f"{key} = ", f"{option} ")
    return message


def _print(simulated, found):
    columns = min(99, shutil.get_terminal_size((99, 24)).columns)
    print(simulated.title, draw(simulated.rows, columns), sep="\n\n", end="\n\n")
    unit = "s" if simulated.times != TIMES else "time units"
    print(f"makespan        {found['makespan']:.6g} {unit}")
    if "gap" in found:
        print(f"lower bound     {found['bound']:.6g} {unit}, proven gap {found['gap']:.2%}")
    print(f"pipeline bubble {found['bubble']:.2%}")
    print("in flight      ", *found["in_flight"], "  (stage 0 first)")
    print("waiting for W  ", *found["weight_inputs"])


def _write_csv(options, passes, placement):
    from hpc3d.console.small_files import naming

    schedule = SCHEDULES.get(options.name)
    if schedule and schedule.asynchronous:
        raise ValueError(
            f"--csv {options.csv}: the steps of {options.name} overlap, but a CSV file "
            "contains the passes of only one step; use a synchronous schedule"
        )
    with naming(options.csv):
        to_csv(options.csv, passes, placement)


if __name__ == "__main__":
    sys.exit(main())
