"""Traces of runs on threads in virtual time, in which some ranks pause during computation."""

from hpc3d import trace
from hpc3d.benchmarks.harness import RandomBatches
from hpc3d.comm import threads
from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder, Span
from hpc3d.training.trainer import Trainer
from tests.analyze.traces import config_of, header
from tests.fakes.virtual_time import Clock, Network

VOCABULARY = 24


class Delay(Span):
    """Context manager that makes a recorded span some seconds longer."""

    __slots__ = ("seconds",)

    def __enter__(self):
        super().__enter__()
        self.recorder.clock.advance(self.seconds * 1e9)


class DelayingRecorder(Recorder):
    """Recorder that adds `delay(recorder, name)` seconds to each span."""

    def __init__(self, *arguments, delay, network, clock):
        super().__init__(*arguments, clock=clock)
        self.delay, self.network = delay, network

    def wrap(self, comm, axis):
        return super().wrap(self.network.wrap(comm, axis, self.clock), axis)

    def span(self, name, op="elementwise", flops=0):
        made = super().span(name, op, flops)
        delay = Delay(self, made.name, made.op, made.flops)
        delay.seconds = self.delay(self, name)
        return delay if delay.seconds else made


def trained(
    folder, ranks, delay=lambda recorder, name: 0, vocabulary=VOCABULARY, lasts=None, **values
):
    """Return the open trace of a complete run; `lasts` contains the durations of calls in ns."""
    config = config_of(ranks, **{"model__vocabulary": vocabulary, **values})
    network = Network(**(lasts or {}))

    def rank(mesh):
        top = {**header(config, mesh.rank, ranks), "host": f"node{mesh.rank}"}
        recorder = DelayingRecorder(
            folder, top, delay=delay, network=network, clock=Clock(mesh.rank)
        )
        batches = RandomBatches(config, vocabulary) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, vocabulary, batches)
        for number in range(config.train.steps):
            trainer.step(number)
        recorder.flush()

    folder.mkdir(exist_ok=True)
    threads.run(config.sizes(), rank)
    return trace.open(merge(folder))
