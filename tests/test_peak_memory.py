"""Peak memory of child processes."""

import subprocess
import sys
import time

from hpc3d.benchmarks import peak_memory


def test_peak_of_a_descendant_is_sampled():
    size = 1 << 26
    inner = f"block = bytearray({size}); del block; print(); input()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        peak_memory.sampled() as peaks,
        subprocess.Popen([sys.executable, "-c", outer], **pipes) as run,
    ):
        run.stdout.readline()
        while not any(size < each < 2 * size for each in peaks.values()):
            time.sleep(0.01)  # until the next sample
        run.communicate(b"\n")
    assert run.pid in peaks and len(peaks) == 2


def test_memory_of_an_import_includes_its_modules():
    assert peak_memory.of_import("json") < peak_memory.of_import("numpy")
