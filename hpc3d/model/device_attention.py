"""Attention on arrays of a device: cuDNN's, or products around a softmax, with all probabilities
in memory."""

from math import sqrt

from hpc3d.arrays.pool import contiguous


class Attention:
    """`launch` starts a kernel (launches.Kernel), `multiply` is Lt.product, `flash` a Flash or
    None, `empty(shape, dtype)` an array of the device, `bring(array)` one with a host's values."""

    def __init__(self, launch, multiply, flash, empty, bring):
        self.launch, self.multiply, self.flash = launch, multiply, flash
        self.empty, self.bring = empty, bring

    def attend(self, qkv, sequence, width, empty, drop=None):
        if self.by_cudnn(qkv, width, drop):
            out, stats = self.flash.forward(qkv, sequence, width)
            return out, (out, stats)
        q, k, v = self.heads(qkv, sequence, width)
        p, weights = self.softmax(q, k, empty, drop)
        out = self.empty(q.shape, q.dtype)
        self.multiply(weights.swapaxes(1, 2), v, out)
        return self.joined(out[None], qkv.shape[1] // (3 * width), empty), p

    def attend_again(self, qkv, sequence, width, empty, drop=None):
        if self.by_cudnn(qkv, width, drop):
            return self.flash.forward(qkv, sequence, width)
        q, k, _ = self.heads(qkv, sequence, width)
        return self.softmax(q, k, empty, None)[0]

    def attend_grad(self, dout, qkv, kept, sequence, width, empty, drop=None):
        if self.by_cudnn(qkv, width, drop):
            return self.flash.backward(dout, qkv, *kept, sequence, width)
        q, k, v = self.heads(qkv, sequence, width)
        d = self.parted(dout, sequence, width, 1)[0]
        weights = kept if drop is None else self.weights(kept, drop)
        grads = self.empty((3, *q.shape), q.dtype)
        self.multiply(weights, d, grads[2])
        ds = self.empty(kept.shape, kept.dtype)
        self.multiply(v, d.swapaxes(1, 2), ds)
        given = {"p": kept, "dweights": ds, **self.masked(kept, q.shape[-1], drop)}
        self.launch("causal_softmax_grad", *kept.shape[:2], **given)
        self.multiply(ds.swapaxes(1, 2), k, grads[0])
        self.multiply(ds, q, grads[1])
        return self.joined(grads, qkv.shape[1] // (3 * width), empty)

    def by_cudnn(self, qkv, width, drop):
        return self.flash and qkv.size and self.flash.suits(qkv.dtype, width, drop)

    def heads(self, qkv, sequence, width):
        """q, k, v [B heads, T, D], each in one piece."""
        return self.parted(qkv, sequence, width, 3)

    def parted(self, x, sequence, width, parts):
        """[B T, heads parts D] -> [parts, B heads, T, D]."""
        batch, heads = x.shape[0] // sequence, x.shape[1] // (parts * width)
        x = x.reshape(batch, sequence, heads, parts, width).transpose(3, 0, 2, 1, 4)
        return contiguous(x).reshape(parts, batch * heads, sequence, width)

    def joined(self, x, heads, empty):
        """[parts, B heads, T, D] -> [B T, heads parts D]."""
        parts, count, sequence, width = x.shape
        x = x.reshape(parts, count // heads, heads, sequence, width).transpose(1, 3, 2, 0, 4)
        out = empty((x.shape[0] * sequence, heads * parts * width), x.dtype)
        out.reshape(x.shape)[...] = x
        return out

    def softmax(self, q, k, empty, drop):
        """The probabilities [B heads, key, query], and those times dropout's factors."""
        shape = (*q.shape[:2], q.shape[1])
        p = empty(shape, q.dtype)
        self.multiply(k, q.swapaxes(1, 2), p)
        weights = p if drop is None else self.empty(shape, q.dtype)
        given = {"scores": p, "weights": None if drop is None else weights}
        self.launch("causal_softmax", *shape[:2], **given, **self.masked(p, q.shape[-1], drop))
        return p, weights

    def masked(self, p, width, drop):
        """The arguments of the softmax besides its arrays."""
        given = {"heads": p.shape[0], "sequence": p.shape[1], "scale": 1 / sqrt(width)}
        if drop is None:
            names = "first_row", "first_column", "width", "limit", "factor"
            return {**given, "dropout_key": None, **dict.fromkeys(names, 0)}
        given["heads"] = len(drop.columns) // p.shape[1] ** 2
        return {**given, **drawn(drop, "dropout_key")}

    def weights(self, p, drop):
        """The probabilities times dropout's factors once more."""
        rows = p.reshape(len(drop.rows), len(drop.columns))
        return self.dropped(rows, drop, self.empty(rows.shape, p.dtype)).reshape(p.shape)


def drawn(mask, key):
    """The arguments of a kernel for dropout, the key under the name `key`."""
    return {
        key: mask.key,
        "first_row": mask.rows.start,
        "first_column": mask.columns.start,
        "width": mask.width,
        "limit": min(round(mask.rate * 2**16), 2**16 - 1),
        "factor": 1 / (1 - mask.rate),
    }
