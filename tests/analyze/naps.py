"""Traces of small runs on threads, in which some ranks sleep while they compute."""

from time import sleep

from hpc3d import trace
from hpc3d.benchmarks.harness import RandomBatches
from hpc3d.comm import threads
from hpc3d.trace.merge import merge
from hpc3d.trace.recorder import Recorder, Span
from hpc3d.training.trainer import Trainer
from tests.analyze.traces import config_of, header

VOCABULARY = 24


class Nap(Span):
    """A span of computation that sleeps first."""

    __slots__ = ("seconds",)

    def __enter__(self):
        super().__enter__()
        sleep(self.seconds)


class Sleepy(Recorder):
    """A recorder that makes its rank sleep `nap(recorder, name)` seconds in a span."""

    def __init__(self, *arguments, nap):
        super().__init__(*arguments)
        self.nap = nap

    def span(self, name, op="elementwise", flops=0):
        made = super().span(name, op, flops)
        nap = Nap(self, made.name, made.op, made.flops)
        nap.seconds = self.nap(self, name)
        return nap if nap.seconds else made


def trained(folder, ranks, nap=lambda recorder, name: 0, vocabulary=VOCABULARY, **values):
    """An open trace of a run of all its steps."""
    config = config_of(ranks, **{"model__vocabulary": vocabulary, **values})

    def rank(mesh):
        top = {**header(config, mesh.rank, ranks), "host": f"node{mesh.rank}"}
        recorder = Sleepy(folder, top, nap=nap)
        batches = RandomBatches(config, vocabulary) if mesh.rank == 0 else None
        trainer = Trainer(mesh.traced(recorder), config, vocabulary, batches)
        for number in range(config.train.steps):
            trainer.step(number)
        recorder.flush()

    folder.mkdir(exist_ok=True)
    threads.run(config.mesh.sizes(), rank)
    return trace.open(merge(folder))
