"""GPT-2: embeddings, blocks, final norm, tied head, loss (Radford et al. 2019)."""

from dataclasses import dataclass

from hpc3d.model.block import Block
from hpc3d.model.layers import Dropout, Embedding, LayerNorm, deferred, row_axes
from hpc3d.model.loss import IGNORE, CrossEntropy
from hpc3d.model.parameters import Parameters
from hpc3d.tensor.layout import Layout
from hpc3d.tensor.matmul import Matmul


@dataclass(frozen=True)
class Shape:
    """The sizes of a model; `std` is that of the initial weights."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tied: bool = True
    gelu: str = "tanh"
    dropout: float = 0.0
    std: float = 0.02

    @property
    def width(self):
        return self.hidden // self.heads

    @property
    def ffn(self):
        return 4 * self.hidden


class GPT2:
    """The model on a mesh, split by `split`."""

    def __init__(self, mesh, shape, split, dtype="float32", seed=0, keep_gathered=True):
        self.mesh, self.shape, self.split = mesh, shape, split
        self.parameters = Parameters(mesh, dtype)
        self.lookup, self.head_split = split.whole().next(), split.whole()
        rows = mesh.count(self.lookup.w[0])
        self.padded = -(-shape.vocabulary // rows) * rows
        self.table = self.add_table("embedding.token", self.lookup.w)
        self.embedding = Embedding(mesh, self.table, self.lookup)
        self.position = self.add_position()
        self.drop = Dropout(mesh, "embedding.drop", split.x, shape.dropout, seed)
        self.blocks = [
            Block(mesh, self.parameters, shape, split, number, keep_gathered, seed)
            for number in range(shape.layers)
        ]
        self.norm = LayerNorm(mesh, self.parameters, "norm", shape.hidden, split.x)
        self.head = Matmul(mesh, self.head_split, keep_gathered, transposed=True)
        self.head_table = self.table if shape.tied else self.add_table("head", self.lookup.w)
        self.loss = CrossEntropy(mesh, self.head_split.y[1], shape.vocabulary)
        self.parameters.allocate(seed)

    def add_table(self, name, layout):
        shape, model = (self.padded, self.shape.hidden), self.shape
        partial = deferred(self.mesh, self.lookup)
        how = {"std": model.std, "decay": True, "rows": model.vocabulary, "partial": partial}
        return self.parameters.add(name, shape, layout, **how)

    def add_position(self):
        shape = (self.shape.sequence, self.shape.hidden)
        layout = Layout("", " ".join(self.split.x[1]))
        how = {"std": self.shape.std, "decay": True, "partial": row_axes(self.split.x)}
        return self.parameters.add("embedding.position", shape, layout, **how)

    def forward_loss(self, tokens, targets, number=0):
        """This rank's share of the mean loss of a batch [sequences, T], and what backward needs.

        All ranks bring the whole batch of step `number`.  The sum of the shares over all ranks is
        the mean over the tokens whose target is not IGNORE.
        """
        valid = max(1, int((targets != IGNORE).sum()))
        self.mesh.trace.phase = "forward"
        logits, saved = self.forward(tokens, number)
        mine = self.rows(targets, self.head_split.y).ravel()
        loss, saved_loss = self.loss.forward(logits, mine)
        share = loss / valid if self.counts_loss() else 0.0
        return share, [saved, saved_loss, valid, number, len(tokens)]

    def backward_loss(self, saved):
        """Add the gradients of the mean loss to the parameters'; empties `saved` on the way."""
        self.mesh.trace.phase = "backward"
        number, batch = saved[3:]
        dlogits = self.loss.backward(saved[1], 1 / saved[2])
        passed = saved[0]
        saved.clear()
        self.backward(dlogits, passed, number, batch)

    def forward(self, tokens, number=0):
        """The logits Y[m, v] of a batch and what `backward` needs."""
        self.mesh.trace.layer = -1
        shape = (tokens.size, self.shape.hidden)
        x, saved_embedding = self.embedding.forward(self.rows(tokens, Layout(self.lookup.m)))
        with self.mesh.trace.span("embedding", "lookup"):
            sequences = x.reshape(-1, self.shape.sequence, x.shape[1])
            x = (sequences + self.position.value).reshape(x.shape)
        x, saved_blocks = self.drop.apply(x, number, shape), []
        for block in self.blocks:
            x, saved = block.forward(x, number, len(tokens))
            saved_blocks.append(saved)
        self.mesh.trace.layer = -1
        x, saved_norm = self.norm.forward(x)
        logits, saved_head = self.head.apply(x, self.head_table.value)
        return logits, (saved_embedding, saved_blocks, saved_norm, saved_head)

    def backward(self, dlogits, saved, number, batch):
        """Add the gradients of all parameters; what was saved is let go on the way."""
        self.mesh.trace.layer = -1
        saved_embedding, saved_blocks, saved_norm, saved_head = saved
        dx, dtable = self.head.adjoint(saved_head, dlogits)
        self.head_table.grad += dtable
        dx = self.norm.backward(dx, saved_norm, residual=None)
        for block in reversed(self.blocks):
            dx = block.backward(dx, saved_blocks.pop(), number, batch)
        self.mesh.trace.layer = -1
        dx = self.drop.apply(dx, number, (batch * self.shape.sequence, self.shape.hidden))
        with self.mesh.trace.span("embedding", "lookup"):
            sequences = dx.reshape(-1, self.shape.sequence, dx.shape[1])
            self.position.grad += sequences.sum(0)
        self.embedding.backward(dx, saved_embedding)

    def rows(self, batch, layout):
        """This rank's sequences of a batch, for rows that lie as in `layout`."""
        rows = Layout(" ".join(layout[0]), owned=" ".join(layout.owned))
        return batch[rows.slices(batch.shape[:1], self.mesh)]

    def counts_loss(self):
        """Whether this rank's rows of the loss are the copy that counts."""
        split = row_axes(self.head_split.y)
        return all(self.mesh.coord(axis) == 0 for axis in self.mesh.sizes if axis not in split)
