"""A recorder with a test clock, and its recorded rows."""

from hpc3d.arrays.pool import Pool
from hpc3d.trace.segment import read_segment, segment_path

HEADER = {"rank": 3, "world_size": 8}


class Clock:
    """Clock that advances by 10 ns per reading, or by `skip`."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 10
        return self.now

    def skip(self, duration):
        self.now += duration


def recorded(recorder):
    """Return the first segment; write it now if there is none."""
    if not recorder.segments:
        recorder.flush()
    return read_segment(segment_path(recorder.run_dir, 3, 0), 3)


def end_step(recorder, pool=None):
    recorder.end_step(pool or Pool(), 96, 5.5, 2.0, 1e-3, 0.25, 0.5)
