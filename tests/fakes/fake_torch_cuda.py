"""Fake torch.cuda: events on a TimedDevice, and memory statistics. PyTorch computes on the CPU.

Inside its context, each matrix product of PyTorch takes LASTS ns on the device, and SCRATCH bytes
until it ends. Other operations take neither time nor memory.
"""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.timed_device import Simulated, TimedDevice

LASTS, SCRATCH = 1_000_000, 1 << 20
HELD, TOTAL = 7 * SCRATCH, 1 << 36  # bytes that torch has allocated, and of the device
PRODUCTS = torch.ops.aten.addmm, torch.ops.aten.mm


class Event:
    """torch.cuda.Event"""

    def __init__(self, device, enable_timing=False):
        assert enable_timing, "this event has no time"
        self.device = device

    def record(self):
        self.event = self.device.compute.record()

    def synchronize(self):
        self.event.synchronize()

    def elapsed_time(self, later):
        return self.device.elapsed(self.event, later.event)


class FakeTorchCuda(TorchDispatchMode):
    def __init__(self, monkeypatch):
        super().__init__()
        self.device, self.peak = TimedDevice(Simulated()), HELD
        functions = {
            "Event": partial(Event, self.device),
            "is_available": lambda: True,
            "memory_allocated": lambda: HELD,
            "max_memory_allocated": lambda: self.peak,
            "reset_peak_memory_stats": self.reset,
            "mem_get_info": lambda: (TOTAL // 2, TOTAL),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self):
        self.peak = HELD

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if getattr(function, "overloadpacket", None) in PRODUCTS:
            self.device.compute.work(LASTS)
            self.peak = HELD + SCRATCH
        return function(*args, **(kwargs or {}))
