"""Tensors that torch.autograd saves for the backward pass: counted, rounded and offloaded.

The tensors are saved in memory blocks (storages of torch), and views of the same memory are saved
once. Weights and model inputs stay where they are. If `parallel.keep_dtype` is set, the results of
operations and the received tensors are stored in the forms of hpc3d.model.kept, and the backward
pass uses the rounded values. A row, which has one scale, is the last dimension of the result, or
the dimension that is contiguous in memory if the result is transposed. The following tensors stay
exact:

    statistics inside an operation, such as the log-sum-exp of attention or the mean of a norm
    results whose last dimension is 1
    tensors of another data type than the parameters, such as masks and indices

If activations are offloaded, all saved memory moves to the host store, and returns when the
backward pass needs it. The block that was saved before is then prefetched.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from hpc3d.arrays.array import SavedActivation
from hpc3d.model.kept import KeptForm
from hpc3d.partition.capturing.user_code import tensors
from hpc3d.partition.execution.torch_errors import memory_errors
from hpc3d.partition.shared_arrays import array_of, tensor_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from hpc3d.comm.mesh import Mesh


class SavedTensors:
    """Storage of the tensors that a rank saves; the arguments are those of KeptForm."""

    def __init__(
        self, mesh: Mesh, dtype: DTypeLike, keep_dtype: str | None = None, offload: bool = False
    ) -> None:
        self.mesh, self.offload, self.rounds = mesh, offload, keep_dtype is not None
        self.dtype = getattr(torch, np.dtype(dtype).name)
        self.rounded = KeptForm(mesh, dtype, keep_dtype, offload)
        self.exact = KeptForm(mesh, np.uint8, None, offload)  # any data type, as bytes
        self._name: str | None = None  # name of the compute event that is being recorded
        self._event: AbstractContextManager[Any] = nullcontext()

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Record a compute event, which is split by the copies of saved tensors."""
        self._name = name
        self._begin()
        with memory_errors():
            yield
        self._end()
        self._name = None

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Interrupt the compute event, because events of the same stream must not overlap."""
        if self._name:
            self._end()
        yield
        if self._name:
            self._begin()

    def _begin(self):
        self._event = self.mesh.trace.span(self._name, "gemm")
        self._event.__enter__()

    def _end(self):
        self._event.__exit__(None, None, None)

    def microbatch(
        self, held: Iterable[Any], received: Iterable[torch.Tensor] = ()
    ) -> SavedOfMicrobatch:
        """Return the storage for a forward pass of a microbatch.

        Tensors in `held` stay in memory until the end of the step. `received` contains the tensors
        from the previous model chunk, which the pool of the mesh has already counted.
        """
        return SavedOfMicrobatch(self, held, received)

    def recomputed(self, held: Iterable[Any]) -> AbstractContextManager[Any]:
        """Return a context manager that counts the tensors that a recomputed pass saves."""
        counting = SavedTensors(self.mesh, np.uint8)
        return counting.microbatch(held).saving()


class SavedOfMicrobatch:
    """Memory that autograd saves in one forward pass, as described by `SavedTensors`."""

    def __init__(
        self, how: SavedTensors, held: Iterable[Any], received: Iterable[torch.Tensor]
    ) -> None:
        self.how, self.moves = how, how.rounds or how.offload
        self.waiting: list[SavedTensor] = []
        self.held = {_key(tensor): tensor for tensor in tensors([*held])}
        # Row length of each result's storage. The references prevent reuse of the addresses.
        self.rows: dict[int, tuple[int, StorageWeakRef]] = {}
        self.blocks: Any = weakref.WeakValueDictionary()
        self.last: Callable[[], _Stored | None] = lambda: None
        if how.rounds:
            self.note(received)
        if not self.moves:
            self.held |= {_key(tensor): tensor for tensor in received}

    def saving(self) -> AbstractContextManager[Any]:
        """Return a context manager for the forward pass, which saves all tensors of autograd."""
        contexts = ExitStack()
        contexts.callback(self.store)
        contexts.enter_context(saved_tensors_hooks(self.save, SavedTensor.value))
        contexts.enter_context(_Results(self) if self.moves else nullcontext())
        return contexts

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Save a tensor. It is rounded and offloaded when its operation is complete."""
        saved = SavedTensor(tensor.detach())
        self.waiting.append(saved)
        if not self.moves:
            self.store()
        return saved

    def all(self, values: Iterable[torch.Tensor]) -> list[SavedTensor]:
        """Save tensors; return one `SavedTensor` for each."""
        saved = [self.save(tensor) for tensor in values]
        self.store()
        return saved

    def note(self, results: Any) -> None:
        """Record the row length of each result's storage."""
        for tensor in tensors(results):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.rows:
                rows = _row(tensor) if tensor.dtype == self.how.dtype else 1
                self.rows[storage._cdata] = rows, StorageWeakRef(storage)

    def store(self) -> None:
        """Round, offload or count the memory of the tensors that were saved so far."""
        for saved in self.waiting:
            if self.moves:
                saved.tensor = saved.tensor.resolve_conj().resolve_neg()
            tensor = saved.tensor
            if tensor.untyped_storage().nbytes() and _key(tensor) not in self.held:
                self._store(saved, tensor)
        self.waiting.clear()

    def _store(self, saved, tensor):
        how, storage = self.how, tensor.untyped_storage()
        row, _ = self.rows.get(storage._cdata, (1, None))
        rounds = row > 1 and tensor.dtype == how.dtype
        moves = rounds or how.offload
        key = storage._cdata, tensor._version if moves else None
        block = self.blocks.get(key)
        if block is None and moves:
            form = how.rounded if rounds else how.exact
            dtype = how.dtype if rounds else torch.uint8
            array = _array(tensor, dtype, row if rounds else 0, how.mesh.pool)
            block = _Stored(how, form, array, dtype, self.last)
            block.source = StorageWeakRef(storage)
            self.last = weakref.ref(block)
        elif block is None:
            block = _Counted(how.mesh.pool, storage.nbytes())
        self.blocks[key] = saved.block = block
        if moves:
            saved.resolved()


def _key(tensor):
    return tensor.untyped_storage()._cdata


def _row(tensor):
    """Return the number of elements per row in a tensor's storage.

    Tensors with rows of one element are not rounded. The result is therefore also 1 if the tensor
    covers only a part of its storage.
    """
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
        return 1
    if tensor.is_contiguous():
        return tensor.shape[-1] if tensor.dim() else 1
    adjacent = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride == 1]
    return max(adjacent, default=1)


def _array(tensor, dtype, row, pool):
    """Return the full memory of a tensor as an array of `dtype`, with rows of `row` elements.

    If `row` is 0, the array has one dimension.
    """
    flat = torch.empty(0, dtype=dtype, device=tensor.device).set_(tensor.untyped_storage())
    return array_of(flat.view(-1, row) if row else flat, pool)


class SavedTensor:
    """Tensor saved by autograd. `block` is its memory, or `None` if it is held in any case."""

    __slots__ = ("block", "shape", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, tensor._version
        self.block: Any = None
        self.shape: Any = None

    def resolved(self) -> None:
        """Replace the tensor with its type, offset, shape and strides in the stored block."""
        tensor = self.tensor
        self.shape = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        self.tensor = None

    def value(self) -> torch.Tensor:
        """Return the tensor with the values that the backward pass uses."""
        if self.tensor is None:
            dtype, *where = self.shape
            storage = self.block.storage()
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {[*self.tensor.shape]} that the backward pass needs was "
                "modified by an in-place operation; replace this operation"
            )
        return self.tensor


class _Counted:
    """Memory that stays in place; the pool counts it until the last saved tensor is freed."""

    def __init__(self, pool, nbytes):
        self.pool, self.nbytes = pool, nbytes
        pool.count("activation", nbytes)

    def __del__(self):
        self.pool.count("activation", -self.nbytes)


class _Block(NamedTuple):
    array: SavedActivation


class _Stored:
    """Memory in the form in which it is stored, and later the restored memory.

    `before()` returns the block that was saved before this one, which is prefetched.
    """

    source: StorageWeakRef  # prevents reuse of the address of the source

    def __init__(self, how, form, array, dtype, before):
        self.how, self.form, self.before, self.restored = how, form, before, None
        self.dtype = dtype
        with how.apart():
            self.saved = [form.put_away(_Block(array))]

    def storage(self):
        if self.restored is None:
            with self.how.apart():
                array = self.form.take(self.saved).array
                if before := self.before():
                    before.form.ask(before.saved)
            self.restored = tensor_of(array, self.dtype).untyped_storage()
        return self.restored


class _Results(TorchFunctionMode):
    """Mode that records the results of all operations, and stores the saved tensors after each."""

    def __init__(self, saved):
        super().__init__()
        self.saved = saved

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.saved.store()  # before an operation modifies a saved tensor in place
        made = function(*args, **(kwargs or {}))
        self.saved.note(made)
        self.saved.store()
        return made
