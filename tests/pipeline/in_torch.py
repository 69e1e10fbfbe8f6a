"""The same training on one rank in torch, with the update rules of synchronous steps, PipeDream
and PipeDream-2BW, but without schedules or messages.

A version of the weights is a dict name -> tensor; version u is the version after u updates.
"""

from dataclasses import replace
from functools import partial

import torch

from hpc3d.benchmarks import torch_reference
from hpc3d.comm.threads import run
from hpc3d.config.input_file import MeshConfig, ParallelConfig
from hpc3d.config.resolve import resolve
from hpc3d.model.families import family_of
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.training.optimizers.optimizer import learning_rate
from tests.model import mixture_reference
from tests.pipeline.mixes import Trained, batches_of, trainer_of


class Model:
    """Model of a configuration, with all versions of its weights and their gradients."""

    def __init__(self, config):
        torch.set_num_threads(1)
        alone = resolve(replace(config, mesh=MeshConfig(), parallel=ParallelConfig()), 1)
        (trainer,) = run({}, lambda mesh: trainer_of(mesh, alone))
        self.train, self.shape, self.batches = config.train, trainer.shape, batches_of(config)
        self.family = family_of(config.model)
        self.newest = torch_reference.weights_of(trainer.parameters)
        self.by_sign = {each.name: each.sign_rate for each in trainer.parameters if each.sign_rate}
        self.optimizer = optimizer_of(trainer.parameters, self.newest, config.train)
        self.versions = [self.snapshot()]

    def snapshot(self):
        return {name: weight.detach().clone() for name, weight in self.newest.items()}

    def gradients(self, weights, tokens, targets):
        """Return the summed loss, and the gradients of the mean over valid targets."""
        weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        valid = int((targets != IGNORE).sum())
        if not valid and not self.shape.experts:
            return 0.0, {name: torch.zeros_like(weight) for name, weight in weights.items()}
        given = weights, self.shape, torch.tensor(tokens), torch.tensor(targets)
        if self.shape.experts:
            loss = mixture_reference.loss(*given)
        else:
            loss = torch_reference.loss(*given, self.family)
        return loss.item() * max(1, valid), dict(
            zip(weights, torch.autograd.grad(loss, weights.values()))
        )

    def update(self, step, gradients):
        """Create the next version; return the norm of the gradient before clipping."""
        signs = {name: gradients.pop(name).sign() for name in self.by_sign}
        norm = torch.nn.utils.get_total_norm(gradients.values()).item()
        limit = self.train.clip
        scale = min(1.0, limit / norm) if limit else 1.0  # torch would add 1e-6 to the norm
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.train, step)
        for name, gradient in gradients.items():
            self.newest[name].grad = gradient * scale
        self.optimizer.step()
        with torch.no_grad():
            for name, sign in signs.items():
                self.newest[name] -= self.by_sign[name] * sign
        self.versions.append(self.snapshot())
        return norm

    def trained(self, totals):
        weights = {name: (None, weight.numpy()) for name, weight in self.versions[-1].items()}
        return Trained(totals, weights)


def optimizer_of(parameters, weights, train):
    groups = [
        {"params": [weights[item.name] for item in parameters if item.decay is decay], **how}
        for decay, how in ((True, {"weight_decay": train.weight_decay}), (False, {}))
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, weight_decay=0.0)
    how = train.constants()
    betas = how["beta1"], how["beta2"]
    return torch.optim.AdamW(groups, betas=betas, eps=how["epsilon"], weight_decay=0.0)


def by_batches(config, late):
    """W(t+1) = update(W(t), gradient of batch t at W(t - late)); versions before W(0) are W(0)."""
    model, totals = Model(config), []
    for step in range(config.train.steps):
        tokens, targets = model.batches.batch(step)
        weights = model.versions[max(0, step - late)]
        loss, gradients = model.gradients(weights, tokens, targets)
        totals.append((loss / (targets != IGNORE).sum(), model.update(step, gradients)))
    return model.trained(totals)


def by_microbatches(config):
    """Treat every microbatch as a minibatch: update with the gradient of its own mean loss.

    Stage i of p processes microbatch k with its weights after max(0, k - (p-1-i)) updates. The
    norm of a step is that of its last microbatch.
    """
    model, micros, totals = Model(config), config.parallel.microbatches, []
    rows = config.train.batch // micros
    for step in range(config.train.steps):
        tokens, targets = model.batches.batch(step)
        losses = []
        for number in range(micros):
            weights = met_by(step * micros + number, config, model.versions)
            part = slice(number * rows, (number + 1) * rows)
            loss, gradients = model.gradients(weights, tokens[part], targets[part])
            norm = model.update(step, gradients)
            losses.append(loss)
        totals.append((sum(losses) / (targets != IGNORE).sum(), norm))
    return model.trained(totals)


def met_by(micro, config, versions):
    """Return the weights that a microbatch uses on the stages."""
    behind = {name: config.mesh.p - 1 - stage_of(config, name) for name in versions[0]}
    return {name: versions[max(0, micro - late)][name] for name, late in behind.items()}


def stage_of(config, name):
    """Return the stage of a weight, for stages with one chunk each."""
    unit, number, *_ = name.split(".")
    if unit != "layers":
        return {"embedding": 0, "head": config.mesh.p - 1}[unit]
    return next(stage for stage, part in enumerate(config.layers()) if int(number) in part)


RULES = {
    "none": partial(by_batches, late=0),
    "pipedream": by_microbatches,
    "pipedream-2bw": partial(by_batches, late=1),
}
