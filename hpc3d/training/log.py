"""What a run says of itself, on the terminal and in train.log."""

from __future__ import annotations

import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from hpc3d.config.load import to_toml
from hpc3d.plain import plain
from hpc3d.trace.segment import naming

if TYPE_CHECKING:
    from hpc3d.arrays.host_store import HostStore
    from hpc3d.comm.device_setup import Hardware
    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.runtime.job import Job
    from hpc3d.training.evaluator import Evaluation
    from hpc3d.training.trainer import Step

_LISTED = 8  # hosts, by name


class Log:
    """The lines of rank 0, on the terminal and in train.log."""

    def __init__(self, path: Path, speaks: bool, mode: str = "w") -> None:
        self.path, self.file = path, path.open(mode, encoding="utf-8") if speaks else None

    def say(self, line: str) -> None:
        if self.file:
            print(plain(line), flush=True)
            self.keep(line)

    def warn(self, line: str) -> None:
        """A line that goes to standard error, too, as all do that say why a job ends."""
        if self.file:
            print(f"hpc3d.train: {plain(line)}", file=sys.stderr, flush=True)
            self.keep(line)

    def keep(self, line: str) -> None:
        with naming(self.path):
            print(plain(line), file=self.file, flush=True)

    def header(
        self,
        plan: Any,
        mesh: Mesh,
        job: Job,
        hardware: Hardware,
        layout: Iterable[str],
    ) -> None:
        config = plan.config
        sizes = " ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1)
        for line in to_toml(config).split("\n"):
            self.say(line)
        for line in hosts(job.gather(socket.gethostname())):
            self.say(line)
        self.say(f"{job.size} ranks: {sizes or 'serial'}; {job.library()}")
        for line in (*hardware.lines, *layout):
            self.say(line)
        if config.trace.clock == "cpu":
            self.say("times are CPU time: tokens/s are those of a second of rank 0's")
        rate = "samples/s" if config.torch.factory else " tokens/s"
        self.say(f"step     loss  learning rate  gradient norm {rate}  communication  peak MB")

    def step(self, done: Step) -> None:
        rate = done.tokens / done.seconds
        self.say(
            f"{done.number:4d} {done.loss:8.4f} {done.learning_rate:14.3e} {done.grad_norm:14.4f} "
            f"{rate:9.0f} {100 * done.communication:12.1f} % {done.peak / 1e6:8.1f}"
        )

    def copies(self, store: HostStore, steps: int) -> None:
        """A line for the copies of what was offloaded in so many steps."""
        exposed = "" if store.exposed is None else f", {store.exposed / steps:.3g} s of it exposed"
        self.say(f"offload: {store.copied / steps / 1e6:.1f} MB copied per step{exposed}")

    def evaluation(self, done: Evaluation, best: bool) -> None:
        """A line for an evaluation, which may be the `best` so far."""
        self.say(
            f"evaluation after step {done.step}: loss {done.loss:.4f}, perplexity "
            f"{done.perplexity:.2f}, accuracy {100 * done.accuracy:.2f} %; {done.tokens} tokens "
            f"in {done.seconds:.2f} s" + ", the best so far" * best
        )


def layout_lines(config: Config) -> Iterator[str]:
    """How the model of a configuration lies on the ranks."""
    parallel, split = config.parallel, config.splits()["dense"]
    yield f"scheme {parallel.scheme}: X{split.x}  W{split.w}  Y{split.y}"
    layers = " ".join(str(len(part)) for part in config.layers())
    how = parallel.compression
    yield (
        f"schedule {parallel.schedule}: {parallel.microbatches} microbatches through parts of "
        f"{layers} layers; ZeRO {parallel.zero}" + f"; gradients by {how}" * (how != "none")
    )
    if parallel.offload:
        where = f"files in {gettempdir()}" if config.train.backend == "numpy" else "host memory"
        yield f"offloaded: {', '.join(parallel.offload)}, to {where}"
    if config.mesh.c > 1:
        yield f"context: {_context_line(config)}"


def _context_line(config: Config) -> str:
    """How the tokens of a sequence lie on the ranks along c."""
    context, parts = config.context(), []
    if context.rings > 1:
        parts.append(f"a ring of {context.rings}, each with 2 chunks of {context.chunk} tokens")
    if context.heads > 1:
        parts.append(f"{context.heads} ranks with {context.tokens} tokens each exchange heads")
    return "; ".join(parts)


def hosts(names: Sequence[str]) -> Iterator[str]:
    """How many ranks each host has, if there are several; `names` are the hosts of the ranks."""
    counts = Counter(names)
    if len(counts) > 1:
        listed = [f"{host} {count}" for host, count in counts.items()]
        more = [f"{len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
        shown = ", ".join([*listed[:_LISTED], *more])
        yield f"{len(names)} ranks on {len(counts)} hosts: {shown}"
