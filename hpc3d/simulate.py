"""Simulate a pipeline schedule: diagram, time, bubble and memory.

python -m hpc3d.simulate schedule --name 1f1b --stages 4 --microbatches 8
"""

import argparse
import json
import math
import shutil
import sys

from hpc3d.pipeline.draw import draw
from hpc3d.pipeline.passes import in_flight
from hpc3d.pipeline.schedule import SCHEDULES, find, streams
from hpc3d.pipeline.table import to_csv
from hpc3d.pipeline.timeline import Cost, bubble, makespan, timeline

SCHEDULE = """\
Run a pipeline schedule on a clock: each stage starts a pass when the one before it has ended and
its input has come; messages take --comm and never wait for each other.

Printed are the diagram (F forward, B backward, or its part for the input where there is a W, W the
part for the weights; small letters are chunk 1), the makespan, the bubble as Zero Bubble
(arXiv:2401.10241) defines it, and for each stage the peak number of microbatches in flight, and of
those whose W is still to come."""

MOST_PASSES = 1_000_000

JSON = """\
print one JSON object on the last line: name, stages, microbatches, chunks, steps, the times,
makespan [s], bubble, in_flight and weight_inputs of each stage"""


def main(argv=None):
    """Simulate what the command line says; the exit code is 2 for what cannot be simulated."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except OSError as error:
        print(f"hpc3d.simulate: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"hpc3d.simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _parser():
    exits = "exit codes: 0 good, 2 bad input (one line on stderr says what)"
    parser = argparse.ArgumentParser(
        "python -m hpc3d.simulate", description="Simulate before running.", epilog=exits
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    schedule = commands.add_parser(
        "schedule",
        help="a pipeline schedule with given times of its passes",
        description=SCHEDULE,
        epilog=exits,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    schedule.set_defaults(run=_schedule)
    _add_options(schedule.add_argument)
    return parser


def _add_options(add):
    add("--name", required=True, help=f"{', '.join(SCHEDULES)} or csv:FILE")
    add("--stages", required=True, type=int, metavar="P", help="number of stages")
    add("--microbatches", required=True, type=int, metavar="M", help="microbatches of a step")
    add("--forward", type=_seconds, default=1.0, metavar="S", help=_time("a forward pass"))
    add("--backward", type=_seconds, default=1.0, metavar="S", help=_time("an input gradient"))
    add("--weight", type=_seconds, default=1.0, metavar="S", help=_time("weight gradients"))
    add("--comm", type=_seconds, default=0.0, metavar="S", help="seconds of a message (0)")
    add(
        "--chunks",
        type=int,
        metavar="V",
        help="chunks of a stage (default: its only number, or 2)",
    )
    add("--steps", type=int, default=1, metavar="N", help="training steps, if asynchronous (1)")
    add("--png", metavar="FILE", help="draw the diagram in colours")
    add("--csv", metavar="FILE", help="write the schedule as a file for --name csv:FILE")
    add("--json", action="store_true", help=JSON)


def _time(what):
    return f"seconds of {what} of a microbatch on a stage, all chunks together (1)"


def _seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more seconds")
    return value


def _schedule(options):
    cost = Cost(options.forward, options.backward, options.weight, options.comm)
    if not any(cost[:3]):
        raise ValueError("--forward, --backward and --weight are all 0: give one of them a time")
    if options.chunks is None:
        options.chunks = find(options.name).chunks or 2
    _refuse_large(options)
    passes, placement = streams(
        options.name, options.stages, options.microbatches, options.chunks, options.steps
    )
    if options.csv:
        _write_csv(options, passes, placement)
    rows = timeline(passes, placement, cost)
    found = _found(options, passes, rows)
    _print(found, rows)
    if options.png:
        from hpc3d.analyze.gantt import draw_gantt, spans

        draw_gantt([(_title(found), spans(rows))], options.png)
    if options.json:
        print(json.dumps(found))


def _refuse_large(options):
    sizes = options.stages, options.microbatches, options.chunks, options.steps
    if min(sizes) > 0 and math.prod(sizes) > MOST_PASSES:
        raise ValueError(
            f"--stages x --microbatches x --chunks x --steps = {math.prod(sizes)} forward passes: "
            f"at most {MOST_PASSES} are simulated"
        )


def _found(options, passes, rows):
    """What is simulated and what came out."""
    keys = ("name", "stages", "microbatches", "chunks", "steps")
    times = ("forward", "backward", "weight", "comm")
    peaks = [in_flight(stream) for stream in passes]
    return {
        **{key: getattr(options, key) for key in (*keys, *times)},
        "makespan": makespan(rows),
        "bubble": bubble(rows),
        "in_flight": [peak.activations for peak in peaks],
        "weight_inputs": [peak.weight_inputs for peak in peaks],
    }


def _title(found):
    words = {"stages": "stage", "microbatches": "microbatch", "chunks": "chunk", "steps": "step"}
    sizes = [f"{found[many]} {one if found[many] == 1 else many}" for many, one in words.items()]
    return f"{found['name']}: {', '.join(sizes)}"


def _print(found, rows):
    columns = min(99, shutil.get_terminal_size((99, 24)).columns)
    print(_title(found), draw(rows, columns), sep="\n\n", end="\n\n")
    print(f"makespan        {found['makespan']:.6g} s")
    print(f"bubble          {found['bubble']:.4f}")
    print("in flight      ", *found["in_flight"], "  (stage 0 first)")
    print("waiting for W  ", *found["weight_inputs"])


def _write_csv(options, passes, placement):
    if find(options.name).asynchronous:
        raise ValueError(
            f"--csv {options.csv}: {options.name} runs on across steps, and a file holds one: "
            "choose a synchronous schedule"
        )
    to_csv(options.csv, passes, placement)


if __name__ == "__main__":
    sys.exit(main())
