"""Peak bytes of the tensors of a rank, counted during training."""

import weakref
from math import prod
from time import perf_counter

from torch.utils._python_dispatch import TorchDispatchMode

from hpc3d.comm.threads import run_stages
from hpc3d.partition.capture import capture, shape_of
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.execution.module_trainer import ModuleTrainer
from hpc3d.partition.execution.sample_batches import flat_inputs
from hpc3d.partition.execution.staged_model import staged_model
from hpc3d.partition.execution.torch_weights import values_in
from hpc3d.partition.factory import made_with_data
from hpc3d.partition.measured_profile import UNIT
from hpc3d.partition.module_plan import Wanted
from hpc3d.partition.operation_costs import Operations
from hpc3d.partition.tensor_parallel.plans import tensor_plan
from hpc3d.pipeline.program import program_of
from tests.partition.execution.modules import config_of


class CountedBytes(TorchDispatchMode):
    """Count the `peak` memory of all storages that operations of this thread read or create, each
    from its first operation until nothing refers to it."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count([args, kwargs or {}])
        made = func(*args, **(kwargs or {}))
        self.count(made)
        return made

    def count(self, values):
        for tensor in tensors(values):
            storage = tensor.untyped_storage()
            if (key := storage.data_ptr()) and key not in self.live:
                self.live[key] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, key)
        self.peak = max(self.peak, self.now)

    def ignore(self, values):
        """Do not count tensors that belong to the caller."""
        for tensor in tensors(values):
            self.live[tensor.untyped_storage().data_ptr()] = 0

    def _freed(self, key):
        self.now -= self.live.pop(key)


def _forwarded(program, rows):
    """Return the bytes of received tensors that a chunk only forwards and does not save."""
    (output,) = [node for node in program.module.graph.nodes if node.op == "output"]
    found = [
        node.meta["val"]
        for node, copy in zip(program.received, _placeholders(program), strict=True)
        if [*copy.users] == [output]
    ]
    return sum(prod(shape_of(like, rows)) * like.element_size() for like in found)


def _placeholders(program):
    named = {node.name: node for node in program.module.graph.nodes if node.op == "placeholder"}
    return [named[node.name] for node in program.received]


def peaks(name, replicas, micros, schedule, recompute, ways=1):
    """Return [(predicted, counted)] bytes of every rank in its second step, with a plan of
    MODULE:FACTORY in float32."""
    module, inputs = made_with_data(name, 0)
    captured, ranks = capture(module, inputs), ways * sum(replicas)
    how = {"replicas": replicas, "microbatches": micros, "recompute": recompute}
    how["schedule"] = "1f1b" if schedule == "none" else schedule
    wanted = Wanted(ranks, 1e12, **how)
    plan = tensor_plan(Operations(captured), UNIT, captured.batch, wanted, ways)
    assert plan.choice.replicas == replicas
    again = [stage.recompute for stage in plan.choice.stages]
    model = staged_model(captured, plan.pieces, replicas, again, ways=ways)
    config = config_of(captured, replicas, micros, schedule, plan.choice.chunks)
    flat, values = flat_inputs(captured, inputs), dict(values_in(module, captured))
    program = program_of(config)

    def rank(mesh, line):
        first = mesh.rank == 0
        batches = (lambda step: flat) if first else None
        trainer = ModuleTrainer(mesh, config, model, line, batches, program, perf_counter)
        trainer.fill(values if first else {})
        counted = CountedBytes()
        counted.ignore(flat)
        with counted:
            trainer.step(0)
            counted.peak = counted.now
            trainer.step(1)
        moments = sum(array.nbytes for array in trainer.optimizer.states.values())
        stage = mesh.coord("p")
        waiting = min(micros, len(replicas) - stage) - 1
        unsaved = waiting * _forwarded(model.programs[stage], captured.batch // micros)
        return plan.step.held[stage] - unsaved, counted.peak + moments

    return run_stages(replicas, captured.batch // micros, rank, ways)
