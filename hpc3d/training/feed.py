"""The microbatches of a run, as the instructions of a schedule number them."""

import numpy as np

from hpc3d.model.stage import microbatches, valid_tokens


class Feed:
    """Batches, read on rank 0 (`batches` is None elsewhere), broadcast and cut.

    Microbatch i of a training step is number i; under an asynchronous schedule the numbers count
    on from step to step, and `ahead` steps are fetched in advance, the last step being `last`.
    """

    def __init__(self, mesh, config, batches, asynchronous, ahead):
        self.mesh, self.batches = mesh, batches
        self.shape = (config.train.batch, config.model.sequence)
        self.count, self.alone = config.parallel.microbatches, config.alone
        self.asynchronous, self.ahead, self.last = asynchronous, ahead, config.train.steps - 1
        self.micros, self.valid = {}, {}

    def fetch(self, number):
        """number -> Micro for all that are needed in step `number`."""
        last = min(number + self.ahead, self.last) if self.asynchronous else number
        for old in [place for place, micro in self.micros.items() if micro.step < number]:
            del self.micros[old]
        self.valid = {step: count for step, count in self.valid.items() if step >= number}
        for step in range(number, last + 1):
            if step not in self.valid:
                self.add(step)
        return self.micros

    def add(self, step):
        tokens, targets = self.batch(step)
        self.valid[step] = valid_tokens(targets)
        first = step * self.count if self.asynchronous else 0
        cut = microbatches(step, tokens, targets, self.count, self.alone)
        self.micros.update(enumerate(cut, first))

    def batch(self, step):
        """Inputs and targets of a whole batch; in memory of this rank's own."""
        pair = np.empty((0, *self.shape), np.int32)
        if self.batches is not None:
            with self.mesh.trace.span("read the text", "none"):
                pair = np.stack(self.batches.batch(step))
        tokens, targets = np.array(self.mesh.world.broadcast(pair, 0).wait())
        return tokens, targets
