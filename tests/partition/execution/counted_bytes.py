"""The bytes of tensors that a rank holds at most, counted while it trains."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hpc3d.partition.capture import tensors


class CountedBytes(TorchDispatchMode):
    """The most `peak` of all memory that operations of this thread read or make, a storage from
    the first operation that has it until nothing refers to it."""

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
