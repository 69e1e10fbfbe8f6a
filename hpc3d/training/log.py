"""Log of a run, written to the terminal, train.log and metrics.jsonl."""

from __future__ import annotations

import socket
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import TYPE_CHECKING, Any

from hpc3d.arrays.pool import OFFLOADED
from hpc3d.config.input_file import Config, ModelConfig
from hpc3d.config.load import flat, literal
from hpc3d.console.sanitize import counted, sanitized
from hpc3d.console.small_files import naming
from hpc3d.data.validation import text_names
from hpc3d.model.families import with_epsilon
from hpc3d.pipeline.schedule import find
from hpc3d.pipeline.schedule import usual as usual_schedule
from hpc3d.runtime.colors import say
from hpc3d.runtime.metrics_file import VALIDATION_LOSS_OF, MetricsFile, sinks_of
from hpc3d.training.graphed_step import graph_in_words

if TYPE_CHECKING:
    from hpc3d.arrays.host_store import HostStore
    from hpc3d.comm.device_setup import Hardware
    from hpc3d.comm.mesh import Mesh
    from hpc3d.runtime.job import Job
    from hpc3d.training.evaluator import Evaluation
    from hpc3d.training.trainer import Step

KEPT = "run kept in "  # prefix of a run's last log line, which ends with the run folder
STOPPED_AFTER = "stopped after "  # prefix of the log line of a run that stops early
_LISTED = 8  # maximum number of hosts listed by name
_RECENT = 20  # number of recent steps whose median duration is used to estimate the time left


class Log:
    """Writer of rank 0's log lines (terminal, train.log) and metrics records (metrics.jsonl)."""

    metrics: MetricsFile | None = None
    is_module = False  # True for a PyTorch module
    texts: Sequence[str] = ()  # names of the validation texts

    def __init__(self, path: Path, speaks: bool, mode: str = "w") -> None:
        self.path, self.file = path, path.open(mode, encoding="utf-8") if speaks else None
        self.seconds: deque[float] = deque(maxlen=_RECENT + 1)  # the first step is a warm-up

    def close(self) -> None:
        """Close train.log and metrics.jsonl; every line has been flushed already."""
        for each in (self.file, self.metrics and self.metrics.file):
            if each:
                with suppress(OSError):  # closing flushes again, which fails on a full disk
                    each.close()

    def say(self, line: str, style: str = "") -> None:
        """Print a line and log it. On terminals, use the given style of `hpc3d.runtime.colors`."""
        if self.file:
            with suppress(OSError):  # the terminal may be closed; still write to train.log
                say(sanitized(line), style)
            self.keep(line)

    def warn(self, line: str) -> None:
        """Print a line, such as the reason why the job ends, to standard error, and log it."""
        if self.file:
            say(f"hpc3d.train: {sanitized(line)}", "red", sys.stderr)
            self.keep(line)

    def keep(self, line: str) -> None:
        with naming(self.path):
            print(sanitized(line), file=self.file, flush=True)

    def header(
        self, config: Config, mesh: Mesh, job: Job, hardware: Hardware, layout: Iterable[str]
    ) -> None:
        sizes = " ".join(f"{axis}={size}" for axis, size in mesh.sizes.items() if size > 1)
        for line in differences(config):
            self.say(line, "faint")
        for line in hosts(job.gather(socket.gethostname())):
            self.say(line)
        self.say(f"{counted(job.size, 'rank')}: {sizes or 'serial'}; {job.library()}")
        for line in (*hardware.lines, *layout):
            self.say(line)
        if config.trace.clock == "cpu":
            self.say("all times are CPU times; tokens/s is per second of rank 0's CPU time")

    def record(self, start: int, config: Config) -> None:
        """Print the header of the step table, and open metrics.jsonl at step `start`."""
        self.is_module = bool(config.torch.factory)
        self.texts = text_names(config.data.validation_texts())
        rate = "samples/s" if self.is_module else " tokens/s"
        self.say(
            f"step     loss  learning rate  gradient norm {rate}  communication  peak MB  seconds"
            "  done",
            "bold",
        )
        if self.file:
            run = config.run
            sinks = sinks_of(run.metrics_hook, run.trackers, self.path.parent, flat(config))
            notice = partial(self.say, style="yellow")
            self.metrics = MetricsFile(self.path.parent, start, sinks, notice)

    def step(self, done: Step, steps: int) -> None:
        """Log a completed step of a run with `steps` steps, and write a record of metrics."""
        if not self.metrics:
            return
        rate, number = done.tokens / done.seconds, done.number + 1
        self.seconds.append(done.seconds)
        left = median([*self.seconds][1:] or self.seconds) * (steps - number)
        self.say(
            f"{done.number:4d} {done.loss:8.4f} {done.learning_rate:14.3e} {done.grad_norm:14.4f} "
            f"{rate:9.0f} {100 * done.communication:12.1f} % {done.peak / 1e6:8.1f} "
            f"{done.seconds:8.3f}  {number}/{steps}" + f", {duration(left)} left" * (left > 0)
        )
        self.metrics.write(
            step=done.number,
            steps=steps,
            loss=done.loss,
            learning_rate=done.learning_rate,
            gradient_norm=done.grad_norm,
            tokens=done.tokens,
            seconds=done.seconds,
            tokens_per_s=rate,
            communication=done.communication,
            peak_bytes=done.peak,
            **({} if done.loss_scale is None else {"loss_scale": done.loss_scale}),
        )

    def end_metrics(self) -> None:
        """Let the trackers receive all records; this takes at most some seconds."""
        if self.metrics:
            self.metrics.end()

    def copies(self, store: HostStore, steps: int) -> None:
        """Log the offloaded bytes of rank 0, and the copies per step.

        If known, the time of the copies that do not overlap with computation is also logged.
        """
        exposed = "" if store.exposed is None else f", {store.exposed / steps:.3g} s exposed"
        moved = f"{store.copied / steps / 1e6:.1f} MB copied per step{exposed}"
        self.say(f"offload: {store.pool.peak[OFFLOADED] / 1e6:.1f} MB on rank 0, {moved}")

    def evaluation(self, done: Evaluation, best: bool) -> None:
        """Log an evaluation and write its metrics. `best` is True for the best loss so far."""
        scores = {"perplexity": done.perplexity, "accuracy": done.accuracy}
        if self.is_module:
            scores = {}
        texts = dict(zip(self.texts, done.texts, strict=False))
        for name, each in texts.items():
            self.say(f"evaluation of {name}: {self._result(each)}")
        self.say(
            f"evaluation after step {done.step}: {'mean ' * bool(texts)}{self._result(done)}"
            + ", the best so far" * best,
            "green",
        )
        if self.metrics:
            self.metrics.write(
                step=done.step,
                validation_loss=done.loss,
                **scores,
                evaluated_tokens=done.tokens,
                evaluation_seconds=done.seconds,
                **{f"{VALIDATION_LOSS_OF}{name}": each.loss for name, each in texts.items()},
            )

    def _result(self, done: Evaluation) -> str:
        unit, scores = "samples", ""
        if not self.is_module:
            unit = "tokens"
            scores = f", perplexity {done.perplexity:.2f}, accuracy {100 * done.accuracy:.2f} %"
        return f"loss {done.loss:.4f}{scores}; {done.tokens} {unit} in {done.seconds:.2f} s"


def differences(config: Config) -> list[str]:
    """Return one line for each key of a resolved configuration that differs from its default."""
    usual = flat(Config()) | _settled(config)
    return [
        f"{key} = {literal(value)}"
        for key, value in flat(config).items()
        if value is not None and value != usual[key]
    ]


def _settled(config: Config) -> dict[str, Any]:
    """Return the default values of keys whose default depends on the configuration."""
    schedule = usual_schedule(config.mesh.p)
    return {
        **dict.fromkeys(("mesh.x", "mesh.y", "mesh.z"), 1),
        "parallel.schedule": schedule,
        "parallel.chunks": find(schedule).chunks or 2,
        "model.norm_epsilon": with_epsilon(replace(config.model, norm_epsilon=None)).norm_epsilon,
        "model.vocabulary": 256 if config.data.tokenizer == "byte" else None,
        "data.tokenizer": config.data.tokenizer,  # tokenized_by logs the type of the tokenizer
        "train.decay_steps": replace(config.train, decay_steps=None).decaying(),
    }


def duration(seconds: float) -> str:
    """Format a duration, given in seconds, as 8.69 ms, 41 s, 3 min 20 s, 5 h 12 min or 3 d 4 h."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    units: Sequence[tuple[str, int]] = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    for (name, size), (smaller, part) in pairwise(units):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {smaller}"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{whole} s"


def layout_lines(config: Config, transport: str = "") -> Iterator[str]:
    """Yield log lines about the distribution of the model over the ranks, and the CUDA graph.

    `transport` is the transport of the ranks; the default is `mesh.transport`.
    """
    parallel, split = config.parallel, config.splits["dense"]
    stored = f"X{split.x.indexed('mk')}  W{split.w.indexed('kn')}  Y{split.y.indexed('mn')}"
    yield f"{parallel.way}: {stored}"
    layers = [len(part) for part in config.layers()]
    parts = f"model chunks of {' '.join(map(str, layers))} layers"
    through = counted(layers[0], "layer") if len(layers) == 1 else parts
    compression = parallel.compression
    how = "" if compression == "none" else f"; gradients compressed by {compression}"
    yield (
        f"schedule {parallel.schedule}: {counted(parallel.microbatches, 'microbatch')} "
        f"through {through}; {parallel.sharding}{how}"
    )
    yield from _local_lines(config)
    yield from offload_lines(config)
    yield from _window_lines(config.model)
    if config.mesh.c > 1:
        yield f"context: {_context_line(config)}"
    if config.train.backend == "cupy":
        yield f"CUDA graph: {graph_in_words(config, transport)}"


def _local_lines(config: Config) -> Iterator[str]:
    """Yield a log line about the workers, if the run has local updates."""
    parallel = config.parallel
    if parallel.local_steps:
        workers, often = counted(config.workers, "worker"), f"every {parallel.local_steps} steps"
        often = often if parallel.local_steps > 1 else "every step"
        rates = f"outer learning rate {parallel.outer_learning_rate:g}"
        rates += f", Nesterov momentum {parallel.outer_momentum:g}" * (parallel.outer_momentum > 0)
        sync = f"; {parallel.sync} agreements"
        yield f"local updates: {workers}, which agree {often}{sync}; {rates}"


def offload_lines(config: Config) -> Iterator[str]:
    """Yield a log line about the offloaded data and their location, if data is offloaded."""
    if offload := config.parallel.offload:
        where = f"files in {gettempdir()}" if config.train.backend == "numpy" else "host memory"
        yield f"offload: {', '.join(offload)} to {where}"


def _window_lines(model: ModelConfig) -> Iterator[str]:
    """Yield a log line if model.window or model.global_every has no effect."""
    if model.window >= model.sequence:
        limit = f"the sequences have {counted(model.sequence, 'token')}"
        yield f"window: model.window = {model.window} has no effect, because {limit}"
    elif model.global_every > model.layers:
        limit = f"the model has {counted(model.layers, 'block')}"
        yield f"window: model.global_every = {model.global_every} has no effect, because {limit}"


def _context_line(config: Config) -> str:
    context, parts = config.context(), []
    if context.rings > 1:
        tokens = counted(context.chunk, "token")
        parts.append(f"ring of {context.rings} ranks with 2 chunks of {tokens} each")
    if context.heads > 1:
        tokens = counted(context.tokens, "token")
        parts.append(f"all-to-all of {context.heads} ranks with {tokens} each")
    return "; ".join(parts)


def hosts(names: Sequence[str]) -> Iterator[str]:
    """If a run spans several hosts, yield a log line with the number of ranks on each host."""
    counts = Counter(names)
    if len(counts) > 1:
        listed = [f"{host} {count}" for host, count in counts.items()]
        more = [f"{len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
        shown = ", ".join([*listed[:_LISTED], *more])
        yield f"{len(names)} ranks on {len(counts)} hosts: {shown}"
