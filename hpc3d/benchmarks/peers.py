"""Compare hpc3d with PyTorch's own parallelism: the command `bench peers`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from hpc3d import trace
from hpc3d.analyze.report.table_format import (
    ColumnSpec,
    TableSpec,
    columns,
    integer,
    markdown,
    milliseconds,
    prefixed,
    ratio,
    write,
)
from hpc3d.benchmarks import harness, peak_memory
from hpc3d.config import package_data
from hpc3d.config.argument_types import Joined, choice, number_of_ranks, positive, several
from hpc3d.config.input_file import Config
from hpc3d.config.load import literal, load
from hpc3d.config.load import options as overridden
from hpc3d.config.resolve import resolve
from hpc3d.console.command_line import Parser
from hpc3d.console.sanitize import Problems
from hpc3d.data.token_file import open_tokens
from hpc3d.predict.simulation.count import COMM
from hpc3d.runtime import metrics_file
from hpc3d.runtime.optional_packages import need
from hpc3d.trace.schema import SEND
from hpc3d.training.masking import batches_of

_DESCRIPTION = """\
Compare the step time of hpc3d with PyTorch's own parallelism, for the same model, batch, number of
ranks and threads, with gloo on CPUs:

    eager, compile    one rank, with one thread and with all threads
    ddp               DistributedDataParallel; hpc3d: data parallelism (d)
    fsdp2             fully_shard; hpc3d: data parallelism with ZeRO stage 3
    tp, tp-sequence   DTensor tensor parallelism, without and with sequence parallelism; hpc3d:
                      schemes 1d and 1d-sequence
    1f1b, interleaved torch.distributed.pipelining; hpc3d: the same schedules (p)

Both sides start from the same weights and train on the same batches with AdamW. A run has one
warm-up step and 5 measured steps. Runs of hpc3d and of PyTorch alternate. The ratio is the median
over pairs of runs, and the command fails if the losses of a pair differ.

The default model is a GPT with 4 layers, hidden size 512 and 4,096 tokens per step in float32. A
pipeline has at least one layer per model chunk. The table (CSV, Markdown, LaTeX) is written to
DIR/peers. The command requires Linux."""

_SINGLE = "eager", "compile"
_PIPELINES = "1f1b", "interleaved"
_PEERS = (*_SINGLE, "ddp", "fsdp2", "tp", "tp-sequence", *_PIPELINES)
_ROUNDS = 5
_STEPS = 6  # of a run; the first is a warm-up
_TOLERANCE = 1e-4  # maximum relative difference of the losses; rounding causes about 1e-7
_INPUT = "gpt-serial.toml"
_MODEL = {
    "model.hidden": 512,
    "model.layers": 4,
    "model.heads": 8,
    "model.sequence": 256,
    "train.batch": 16,
    "train.learning_rate": 3e-4,
}
# The model, optimizer and learning rate that hpc3d.benchmarks.torch_peers implements.
_FIXED = {
    "model.kind": "gpt2",
    "model.tied": False,
    "model.gelu": "tanh",
    "model.dropout": 0.0,
    "model.experts": 0,
    "train.optimizer": "adamw",
    "train.warmup": 0,
    "train.decay": "constant",
}
# The modules that a rank imports before it allocates memory for the model.
_IMPORTED = {
    "ours": ("hpc3d.train", "hpc3d.runtime.job", "hpc3d.checkpoints.saver", "pydantic"),
    "theirs": ("hpc3d.benchmarks.torch_peers",),
}
_TABLE = TableSpec(
    "peers",
    "PyTorch peers",
    (
        ColumnSpec("peer", "peer"),
        *columns(integer, ranks="ranks", threads="threads per rank", layers="layers"),
        *columns(milliseconds, ours_s="hpc3d [ms]", theirs_s="PyTorch [ms]"),
        *columns(ratio, ratio="ratio", ratio_min="from", ratio_max="to"),
        *columns(prefixed, ours_received="hpc3d received [B]"),
        *columns(prefixed, theirs_received="PyTorch received [B]"),
        *columns(prefixed, ours_peak="hpc3d peak memory [B]"),
        *columns(prefixed, theirs_peak="PyTorch peak memory [B]"),
        ColumnSpec("difference", "difference of losses", "{:.1e}".format),
    ),
)


class Pair(NamedTuple):
    """Row of the table: a peer, the number of ranks, and the number of threads per rank."""

    peer: str
    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{self.peer}, ranks: {self.ranks}, threads per rank: {self.threads}"

    def layout(self) -> dict[str, Any]:
        """Return the keys of the layout that corresponds to the peer in hpc3d."""
        n = self.ranks
        pipeline = {
            "mesh.p": n,
            "parallel.schedule": self.peer,
            "parallel.microbatches": 2 * n,
        }
        return {
            "eager": {},
            "compile": {},
            "ddp": {"mesh.d": n},
            "fsdp2": {"mesh.d": n, "parallel.zero": 3},
            "tp": {"mesh.x": n, "parallel.scheme": "1d"},
            "tp-sequence": {"mesh.x": n, "parallel.scheme": "1d-sequence"},
            "1f1b": pipeline,
            "interleaved": pipeline | {"parallel.chunks": 2},
        }[self.peer]

    def sizes(self, overrides: Sequence[str]) -> list[str]:
        """Return the options of the model and the optimizer. A pipeline may need more layers."""
        words = [*_options(_MODEL), *overrides, *_options(_FIXED)]
        chunks = self.ranks * self.layout().get("parallel.chunks", 1)
        if self.peer in _PIPELINES and chunks > _config(words, 1).model.layers:
            words += _options({"model.layers": chunks})
        return words


def _options(keys: Mapping[str, Any]) -> list[str]:
    return [f"--{key}={literal(value)}" for key, value in keys.items()]


def _config(words: Sequence[str], ranks: int) -> Config:
    return resolve(load(package_data.shipped(_INPUT), words), ranks)


def parser() -> Parser:
    """Return the command-line parser of `bench peers`."""
    usage = "%(prog)s [options] [--section.key value ...]"
    parser = Parser("bench peers", _DESCRIPTION, usage=usage)
    add = parser.add_argument
    text = f"peers to compare with (default: all: {', '.join(_PEERS)})"
    add(
        "--peers",
        action=Joined,
        type=partial(several, partial(choice, _PEERS)),
        default=",".join(_PEERS),
        help=text,
    )
    text = "numbers of ranks of the parallel peers (default: 4,8)"
    numbers = partial(several, number_of_ranks)
    add("--ranks", type=numbers, action=Joined, default="4,8", help=text)
    text = f"number of pairs of runs (default: {_ROUNDS})"
    add("--rounds", type=positive, default=_ROUNDS, metavar="N", help=text)
    text = "folder for the table and the runs (default: results)"
    add("--out", type=Path, default=Path("results"), metavar="DIR", help=text)
    add("--json", action="store_true", help="print one JSON object on the last line")
    return parser


def pairs(peers: Sequence[str], ranks: Sequence[int], cores: int) -> list[Pair]:
    """Return the rows of the table. Parallel peers use at most one thread per core."""
    single = dict.fromkeys([1, cores])
    found = [Pair(peer, 1, each) for peer in peers if peer in _SINGLE for each in single]
    return found + [
        Pair(peer, count, max(1, cores // count))
        for count in ranks
        for peer in peers
        if peer not in _SINGLE
    ]


def main(options: Namespace, overrides: Sequence[str]) -> None:
    """Measure all pairs, and print and write the table."""
    need("bench peers", "torch")
    _refuse(overrides)
    folder = options.out / "peers"
    rows = pairs(options.peers, options.ranks, len(os.sched_getaffinity(0)))
    cases = [PairedRuns(pair, overrides, folder / "runs") for pair in rows]
    imported = {side: peak_memory.of_import(*names) for side, names in _IMPORTED.items()}
    with harness.watched() as load:
        for number in range(options.rounds):
            for case in cases:
                print(f"round {number + 1}: {case.pair}", flush=True)
                case.measure()
    table = [case.row(imported) for case in cases]
    write(_TABLE, table, folder)
    print(markdown(_TABLE.fields, table))
    print(f"written to {folder / _TABLE.name}.*")
    if options.json:
        print(json.dumps({"rows": table, **load}))


def _refuse(overrides: Sequence[str]) -> None:
    """Raise Problems if an option changes a key that defines the comparison."""
    fixed = {*_FIXED, *(key for peer in _PEERS for key in Pair(peer, 2, 1).layout())}
    given = {option.removeprefix("--") for option, _ in overridden(overrides)}
    if wrong := sorted(given & fixed):
        raise Problems([f"--{key}: peers sets this key; remove the option" for key in wrong])


class PeerRun(NamedTuple):
    """Measurements of a run: losses of all steps, median step time, received bytes per rank and
    step, and the peak memory of the largest process."""

    losses: Sequence[float]
    step_s: float
    received: float
    peak: int


class PairedRuns:
    """Repeated runs of hpc3d and of PyTorch for one row of the table."""

    def __init__(self, pair: Pair, overrides: Sequence[str], folder: Path) -> None:
        self.pair, self.sizes = pair, pair.sizes(overrides)
        self.words = [*self.sizes, *_options(pair.layout())]
        self.config = _config(self.words, pair.ranks)
        self.folder = folder / f"{pair.peer}-{pair.ranks}-{pair.threads}"
        self.ours: list[PeerRun] = []
        self.theirs: list[PeerRun] = []

    def measure(self) -> None:
        """Run hpc3d and PyTorch once each. Raises Problems if the losses differ."""
        if not self.ours:
            self._write_start()
        self.ours.append(self._run_ours())
        self.theirs.append(self._run_theirs())
        if not self.difference() <= _TOLERANCE:
            raise Problems(
                [
                    f"{self.pair}: the losses differ, so the runs do not do the same work",
                    f"hpc3d: {self.ours[-1].losses}",
                    f"PyTorch: {self.theirs[-1].losses}",
                ]
            )

    def difference(self) -> float:
        """Return the largest relative difference of the losses in a pair of runs."""
        ours, theirs = (
            np.array([run.losses for run in runs]) for runs in (self.ours, self.theirs)
        )
        return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))

    def _write_start(self) -> None:
        """Write the sizes, the initial weights and the batches of the run for torch_peers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = _config(self.sizes, 1)
        weights = {each.name: each.value for each in harness.serial_trainer(config).parameters}
        with open_tokens(package_data.text_path(config.data.paths()[0])) as tokens:
            source = batches_of(config, tokens)
            batches = np.stack([source.batch(step) for step in range(_STEPS)])
        np.savez(self.folder / "start.npz", batches=batches, **weights)
        parallel, train = self.config.parallel, self.config.train
        job = vars(self.config.model) | vars(train) | train.constants()
        job |= {"chunks": parallel.chunks, "microbatches": parallel.microbatches}
        (self.folder / "job.json").write_text(json.dumps(job), "utf-8")

    def _run_ours(self) -> PeerRun:
        pair, path = self.pair, str(package_data.shipped(_INPUT))
        with peak_memory.sampled() as peaks:
            done = harness.run(
                pair.ranks, [path, *self.words], str(self.folder), _STEPS, threads=pair.threads
            )
        losses = [record["loss"] for record in metrics_file.read(done["folder"])]
        with trace.open(done["folder"] / "trace.h5") as recorded:
            events = recorded.events
            calls = (events["category"] == COMM) & (events["step"] > 0)
            calls &= events["op"] != SEND
            received = float(events["bytes"][calls].sum()) / pair.ranks / (_STEPS - 1)
        return PeerRun(losses, done["step_s"], received, max(peaks.values()))

    def _run_theirs(self) -> PeerRun:
        with peak_memory.sampled() as peaks:
            _torchrun(self.pair, self.folder)
        found = json.loads((self.folder / "result.json").read_text("utf-8"))
        step_s = median(found["seconds"][1:])
        return PeerRun(found["losses"], step_s, found["received"], max(peaks.values()))

    def row(self, imported: Mapping[str, int]) -> dict[str, Any]:
        """Return the row of the table; `imported` is the memory of the libraries of each side."""
        ours, theirs = self.ours, self.theirs
        found = {
            **self.pair._asdict(),
            "layers": self.config.model.layers,
            **harness.ratios([run.step_s for run in ours], [run.step_s for run in theirs]),
            "difference": self.difference(),
        }
        for side, runs in (("ours", ours), ("theirs", theirs)):
            found[f"{side}_received"] = runs[-1].received
            found[f"{side}_peak"] = max(0, max(run.peak for run in runs) - imported[side])
        return found


def _torchrun(pair: Pair, folder: Path) -> None:
    """Run a peer with torchrun on this host. Raises Problems if it fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [f"--nproc-per-node={pair.ranks}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    program = ["-m", "hpc3d.benchmarks.torch_peers", pair.peer, str(folder)]
    command = [sys.executable, "-m", "torch.distributed.run", *launch, *program]
    settings = {"OMP_NUM_THREADS": str(pair.threads), "GLOO_SOCKET_IFNAME": "lo"}
    how = {"env": os.environ | settings, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, **how)
    if done.returncode:
        raise Problems([f"{' '.join(command)} failed:", *done.stderr.splitlines()])
