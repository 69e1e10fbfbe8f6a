"""The GPU of a rank, its memory and its streams, with a fake CuPy."""

import gc
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

from hpc3d.arrays.pool import contiguous, from_host, to_host, value_of, writeable
from hpc3d.comm.comm_stream import CommStream
from hpc3d.comm.communicator import Self, ready
from hpc3d.comm.host_staged import HostStaged
from hpc3d.cuda import device as cuda
from hpc3d.cuda.device import Cuda, DevicePool, bound
from tests.fakes.fake_cupy import FakeCupy


def slow():
    """Device that executes operations only when it is queried."""
    fake = FakeCupy(slow=True)
    return fake, Cuda(0, fake)


def test_device_is_selected_before_its_streams_are_created(monkeypatch):
    fake = FakeCupy(count=4)
    monkeypatch.setattr(cuda, "imported", lambda: fake)
    assert str(bound(6)) == "Simulated (2)"
    assert fake.log == ["device 2 used", *["stream made"] * 6, "stream used"]


def test_launcher_may_expose_one_device_per_rank(monkeypatch):
    monkeypatch.setattr(cuda, "imported", lambda: FakeCupy(count=1))
    assert [bound(local).number for local in range(3)] == [0, 0, 0]


def test_upload_copies_the_host_array():
    _, device = slow()
    host = np.arange(12.0).reshape(3, 4)
    array = device.upload(host)
    host[:] = -1
    assert type(array) is device.array_type
    np.testing.assert_array_equal(device.download(array), np.arange(12.0).reshape(3, 4))


def test_pinned_memory_is_reused_only_after_its_copy():
    fake, device = slow()
    arrays = [device.upload(np.full(9, number)) for number in range(3)]
    assert fake.log.count("pinned") == 3, "none of these copies has been made"
    device.synchronize()
    arrays += [device.upload(np.full(9, number)) for number in (3, 4)]
    assert fake.log.count("pinned") == 4, "the first of them was asked for too early"
    device.synchronize()
    assert [int(array[0]) for array in arrays] == [0, 1, 2, 3, 4]


def test_download_synchronizes_and_returns_a_copy():
    _, device = slow()
    array = device.upload(np.ones(5))
    first, second = device.download(array), device.download(array)
    assert first.tolist() == [1.0] * 5 and not np.shares_memory(first, second)


def test_waiting_host_runs_its_callbacks():
    _, device = slow()
    seen = []
    device.meanwhile.append(lambda: seen.append(True))
    device.upload(np.ones(3))
    device.synchronize()
    assert seen


def test_nccl_error_is_raised_while_the_host_waits():
    def failed():
        raise OSError("NCCL_ERROR_REMOTE_ERROR")

    fake, device = slow()
    fake.stuck = True
    device.meanwhile.append(failed)
    with pytest.raises(OSError, match="REMOTE"):
        device.synchronize()


def test_device_error_ends_the_wait():
    fake, device = slow()
    fake.lost = True
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        device.synchronize()


@pytest.mark.parametrize(
    ("stuck", "child", "aborted"),
    [(True, False, ["aborted"]), (False, False, []), (True, True, [])],
    ids=["peers are gone", "all is done", "in a child"],
)
def test_close_aborts_communicators_of_a_stuck_device(stuck, child, aborted, monkeypatch):
    monkeypatch.setattr(cuda, "GRACE", 0.05)
    fake, device = slow()
    calls = []
    device.aborts.append(lambda: calls.append("aborted"))
    device.queues["blocks"].record()
    fake.stuck, device.process = stuck, device.process + child
    device.close()
    assert calls == aborted


def test_device_arrays_are_counted_until_their_last_view_is_deleted():
    pool = DevicePool(Cuda(0, FakeCupy()))
    weights = pool.zeros((4, 8), np.float32, "parameter")
    block = pool.empty((16, 2), np.float64)
    part = block[3:].reshape(-1)[1:].view(np.uint16)
    del block
    assert (pool.live["parameter"], pool.live["activation"]) == (128, 256)
    del part
    assert (pool.live["parameter"], pool.live["activation"]) == (128, 0)
    assert (pool.peak["activation"], pool.peak["all"]) == (256, 384)
    assert not weights.any() and type(weights) is pool.device.array_type


def test_array_without_rows_is_valid_and_a_too_large_one_raises():
    pool = DevicePool(Cuda(0, FakeCupy(most=100)))
    none = pool.empty((0, 8), np.float32)
    assert none.shape == (0, 8)
    with pytest.raises(MemoryError):
        pool.empty((26,), np.float32)
    assert pool.live.total() == 0


def test_uploaded_arrays_are_counted():
    pool = DevicePool(Cuda(0, FakeCupy()))
    array = pool.bring(np.arange(6, dtype=np.int32))
    assert pool.live["activation"] == 24 and to_host(array).tolist() == [0, 1, 2, 3, 4, 5]


def test_device_array_conversions():
    device = Cuda(0, FakeCupy())
    array = device.upload(np.arange(6.0).reshape(2, 3))
    turned = contiguous(array.T)
    assert type(turned) is device.array_type and turned.flags.c_contiguous
    assert type(to_host(turned)) is np.ndarray and to_host(turned)[2].tolist() == [2, 5]
    from_host(array[:, 1:], np.zeros((2, 2)))
    assert to_host(array).tolist() == [[0, 0, 0], [3, 0, 0]]
    assert value_of(array[1:, :1]) == 3.0 and writeable(array)


def test_value_of_waits_for_pending_work():
    _, device = slow()
    array = device.upload(np.full(1, 7.0))
    assert value_of(array) == 7.0
    array = device.upload(np.full(4, 8.0))
    assert to_host(array).tolist() == [8.0] * 4


def test_finished_call_releases_device_arrays_but_keeps_host_buffers():
    """Computation waits for the call, so its memory can be reused; the host does not wait."""
    _, device = slow()
    traffic = CommStream(device, nullcontext)
    array, host = device.empty(3, float), np.ones(3)
    there, host_buffers = weakref.ref(array), weakref.ref(host)
    flight = traffic.post(lambda stream: None, array, host_buffers=[host])
    del array, host
    assert there() is not None and host_buffers() is not None
    traffic.finish(flight)
    del flight
    gc.collect()
    assert there() is None and host_buffers() is not None
    while not device.queues["blocks"].done:
        pass
    traffic.post(lambda stream: None)
    assert host_buffers() is None


class Receiving(Self):
    """Hosts that receive 1, 2, 3 in pinned memory."""

    def _recv(self, shape, dtype, peer):
        block = self.pool.empty(shape, dtype, "communication")
        block[...] = self.calls = self.calls + 1
        return ready(block)


def test_host_staged_receive_does_not_overwrite_pending_uploads():
    _, device = slow()
    traffic, pool = CommStream(device, nullcontext), DevicePool(device)
    comm = HostStaged(Receiving(device.pinned), traffic, device.pinned, pool)
    blocks = [comm.recv((4,), np.float32, 0).wait() for _ in range(3)]
    assert [device.download(block).tolist() for block in blocks] == [[1] * 4, [2] * 4, [3] * 4]


def test_fake_cupy_defines_only_names_of_cupy():
    """All names in the fake exist in CuPy, whose import requires no GPU."""
    cupy = pytest.importorskip("cupy")
    for name in vars(FakeCupy().cuda):
        assert hasattr(cupy.cuda, name)
    for name in vars(FakeCupy().cuda.runtime):
        assert hasattr(cupy.cuda.runtime, name)
    for name in ("use", "record", "wait_event", "is_capturing", "done", "synchronize"):
        assert hasattr(cupy.cuda.Stream, name)
    for name in ("ndarray", "empty", "asarray", "ascontiguousarray", "asnumpy"):
        assert hasattr(cupy, name)
