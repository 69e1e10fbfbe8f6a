"""Count, round and offload the tensors that torch.autograd saves for the backward pass.

The tensors are saved in memory blocks (storages of torch), and views of the same memory are saved
once. Weights and model inputs are not copied. A saved buffer is copied if the pass modifies
it, because the next microbatch modifies it again. If `parallel.keep_dtype` is set, the results of
operations and the received tensors are stored in the formats of hpc3d.model.kept, and the backward
pass uses the rounded values. Each row has a scale. Rows extend along the last dimension of the
result or, if the result is transposed, along the dimension that is contiguous in memory. The
following tensors are not rounded:

    statistics inside an operation, such as the log-sum-exp of attention or the mean of a norm
    results whose last dimension is 1
    tensors whose data type differs from that of the parameters, such as masks and indices

If activations are offloaded, all saved blocks are moved to the host store. When the backward pass
reads a block, the block is copied back, and the block saved before it is prefetched.

If all saved tensors stay in place, hooks are needed only to count them. In this case, the sizes
are recorded in the first pass of a model chunk, and later passes with the same number of samples
repeat the counts without hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from hpc3d.arrays.array import SavedActivation
from hpc3d.model.kept import KeptForm
from hpc3d.partition.capturing.torch_errors import memory_errors
from hpc3d.partition.capturing.user_code import tensors
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
        self,
        held: Iterable[Any],
        received: Iterable[torch.Tensor] = (),
        written: Iterable[torch.Tensor] = (),
    ) -> SavedOfMicrobatch:
        """Return the storage for a forward pass of a microbatch.

        Tensors in `held` stay in memory until the end of the step. `received` contains the tensors
        from the previous model chunk, which the pool of the mesh has already counted. `written`
        contains the tensors in `held` that the pass may modify.
        """
        return SavedOfMicrobatch(self, held, received, written)

    def recomputed(self, held: Iterable[Any]) -> AbstractContextManager[Any]:
        """Return a context manager that counts the tensors that a recomputed pass saves."""
        counting = SavedTensors(self.mesh, np.uint8)
        return counting.microbatch(held).saving()


class SavedBytes:
    """Bytes that one forward pass saves, counted in a pool until they are freed.

    In a pass with hooks, each saved block calls `count`, and `mark` records the live bytes. For a
    later pass without hooks, the object of the first pass is the argument `recorded`, and `mark`
    restores the recorded live bytes. Both passes must call `mark` after the forward pass,
    whenever a gradient is complete, and after the backward pass. `copies` is True if the pass
    copies saved buffers. The object references the tensors `received` until no saved bytes are
    live, so that they are freed at the same time as with hooks.
    """

    def __init__(
        self, pool: Any, recorded: SavedBytes | None = None, received: Sequence[torch.Tensor] = ()
    ) -> None:
        self.pool, self.live, self.most, self.copies = pool, 0, 0, False
        self.received = received
        self.marks: list[int] = []
        self.left = iter(recorded.marks) if recorded else None
        if recorded:
            self.count(recorded.most)

    def count(self, nbytes: int) -> None:
        """Count saved bytes, or freed bytes if `nbytes` is negative."""
        self.live += nbytes
        self.most = max(self.most, self.live)
        self.pool.count("activation", nbytes)

    def mark(self) -> None:
        """Record the live bytes, or restore the recorded ones."""
        if self.left is None:
            self.marks.append(self.live)
        else:
            self.count(next(self.left, self.live) - self.live)
            self.received = self.received if self.live else ()

    def __del__(self) -> None:
        if self.left is not None:
            self.count(-self.live)


class SavedOfMicrobatch:
    """Memory that autograd saves in one forward pass, as described by `SavedTensors`."""

    def __init__(
        self,
        how: SavedTensors,
        held: Iterable[Any],
        received: Iterable[torch.Tensor],
        written: Iterable[torch.Tensor],
    ) -> None:
        self.how, self.moves = how, how.rounds or how.offload
        self.counter = SavedBytes(how.mesh.pool)
        self.waiting: list[SavedTensor] = []
        self.held = {_key(tensor): tensor for tensor in tensors([*held])}
        self.written = {_key(tensor): (tensor, tensor._version) for tensor in written}
        self.of_written: list[SavedTensor] = []
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
        contexts.callback(self._copy_modified)
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
            tensor, key = saved.tensor, _key(saved.tensor)
            if key in self.written:
                self.of_written.append(saved)
            if tensor.untyped_storage().nbytes() and key not in self.held:
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
            block = _Counted(self.counter, storage.nbytes())
        self.blocks[key] = saved.block = block
        if moves:
            saved.resolved()

    def _copy_modified(self):
        """Copy the saved buffers that the pass had modified before they were saved."""
        copies: dict[int, Any] = {}
        for saved in self.of_written:
            key, tensor = _key(saved.tensor), saved.tensor
            buffer, version = self.written[key]
            if version != buffer._version == saved.version:
                if key not in copies:
                    storage = tensor.untyped_storage().clone()
                    copies[key] = storage, _Counted(self.counter, storage.nbytes())
                storage, block = copies[key]
                where = tensor.storage_offset(), tensor.shape, tensor.stride()
                saved.replace(tensor.new_empty(0).set_(storage, *where), block)
        self.counter.copies = bool(copies)


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
    """Tensor saved by autograd. `block` is its memory, or `None` if it stays allocated anyway."""

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

    def replace(self, tensor: torch.Tensor, block: Any) -> None:
        """Replace the tensor with a copy, whose memory is `block`."""
        self.tensor, self.version, self.block = tensor, tensor._version, block

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
    """Memory that stays in place; it is counted until the last saved tensor is freed."""

    def __init__(self, counter, nbytes):
        self.counter, self.nbytes = counter, nbytes
        counter.count(nbytes)

    def __del__(self):
        self.counter.count(-self.nbytes)


class _Block(NamedTuple):
    array: SavedActivation


class _Stored:
    """Saved memory that is rounded or offloaded, and restored for the backward pass.

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
