"""Measured and predicted step times on four emulated hosts with two ranks each; two hosts share a
core.  `python -m tests.hosts.steps THIS_MACHINE.toml` takes the machine file of `bench calibrate`,
and prints the table of docs/hosts-study.md.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from hpc3d import train
from hpc3d.predict.machine.machine import Link
from hpc3d.predict.machine.machine_file import load
from hpc3d.predict.simulation.simulator import simulate, step_length
from tests.hosts.emulated import Emulated

ROUNDS, STEPS = 3, 6
LAYOUTS = (
    "p=2 d=4 x=1 y=1 z=1 zero=1 microbatches=4 schedule=zb-h2",
    "p=2 d=2 x=2 y=1 z=1 scheme=1d-sequence microbatches=4 schedule=zb-h2",
    "p=2 d=2 x=1 y=1 z=2 microbatches=4 schedule=zb-h2",
    "d=2 x=4 y=1 z=1",
    "x=2 y=2 z=2",
    "x=8 y=1 z=1",
    "x=2 y=2 z=2 order=pdcexzy",
    "x=8 y=1 z=1 scheme=1d",
    "x=4 y=2 z=1 scheme=2d-summa",
)


def words(line):
    """Return the command line of a layout."""
    found = ["gpt-3d-8", "--train.batch", "32", "--train.steps", str(STEPS)]
    for key, value in (word.split("=") for word in line.split()):
        section = "mesh" if len(key) == 1 or key == "order" else "parallel"
        found += [f"--{section}.{key}", " ".join(value) if key == "order" else value]
    return found


def seconds(hosts, out, line):
    """Return the median time of the steps after the first one."""
    command = [sys.executable, "-m", "hpc3d.train", *words(line), "--run.out", str(out)]
    done = hosts.mpirun((2, 2, 2, 2), *command, env={"OMP_NUM_THREADS": "1"}, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = out.glob("*/metrics.jsonl")
    return median(json.loads(step)["seconds"] for step in file.read_text().splitlines()[1:])


def main(path):
    cases = [*enumerate(LAYOUTS)]
    links = Link(2, 3e-5, 2e9), Link(0, 1e-4, 25e6, 25e6)
    machine = replace(load(path), ranks_per_node=2, cores=0.5, links=links)
    with (
        tempfile.TemporaryDirectory() as folder,
        Emulated(4, shared=[folder], hosts_per_core=2) as hosts,
    ):
        hosts.rate("200mbit", burst="16kb")
        rounds = [
            [seconds(hosts, Path(folder, f"{number}-{index}"), line) for index, line in cases]
            for number in range(ROUNDS)
        ]
    for (_, line), *measured in zip(cases, *rounds, strict=True):
        config = train.read_command_line(8, words(line)).config
        predicted = step_length(simulate(config, 256, machine)) / 1e9
        print(f"| `{line}` | {median(measured):.2f} s | {predicted:.2f} s |")


if __name__ == "__main__":
    main(*sys.argv[1:])
