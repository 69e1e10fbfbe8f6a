"""Copies host arrays to the device for one launch; guards detect writes outside of them."""

import numpy as np

from hpc3d.cuda import launch_table

GUARD = 512  # bytes around an array, which nobody may write
FILL = 0xA5


class Place:
    """Copy of a host array on the device, with guards around it, and with the same offset from an
    address divisible by 16."""

    def __init__(self, device, host, dtype):
        self.device, self.host = device, host
        self.before = GUARD + host.ctypes.data % 16
        self.whole = np.full(self.before + host.nbytes + GUARD, FILL, np.uint8)
        self.inside = slice(self.before, self.before + host.nbytes)
        self.whole[self.inside] = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        self.memory = device.memory(self.whole.nbytes)
        device.write(self.memory, 0, self.whole)
        self.array = device.array(self.memory, self.before, host.shape, dtype)

    def take_back(self, name, written):
        """Copy the data back to the host; return an error text or None."""
        found = np.empty_like(self.whole)
        self.device.read(self.memory, 0, found)
        changed = found != self.whole
        outside = changed.copy()
        outside[self.inside] = False
        if outside.any():
            at = int(np.flatnonzero(outside)[0]) - self.before
            return f"{name}: wrote {int(outside.sum())} bytes outside, first at byte {at}"
        if changed.any() and not written:
            at = int(np.flatnonzero(changed)[0]) - self.before
            return f"{name}: is const, but byte {at} has changed"
        if written:
            self.host.reshape(-1).view(np.uint8)[...] = found[self.inside]
        return None


class Overrun(AssertionError):
    """A kernel wrote outside of its arrays."""


def guarded(device, launch):
    """Return a launcher of host arrays, which are copied to the device with guards and back.
    16-bit integers stand for bfloat16 if a kernel takes T."""

    def launched(name, rows, columns, /, **given):
        kinds = launch_table.kernels()[name].parameters
        places = {
            key: Place(device, value, type_for(kinds[key], value))
            for key, value in given.items()
            if isinstance(value, np.ndarray)
        }
        device.synchronize()
        arrays = {key: place.array for key, place in places.items()}
        launch(name, rows, columns, **{**given, **arrays})
        device.synchronize()
        wrong = [
            place.take_back(key, not kinds[key].startswith("const"))
            for key, place in places.items()
        ]
        if any(wrong):
            raise Overrun(f"{name}: {'; '.join(filter(None, wrong))}")

    return launched


def type_for(kind, host):
    """Return the dtype on the device."""
    half = kind in ("T*", "const T*") and host.dtype == np.uint16
    return np.dtype("bfloat16") if half else host.dtype
