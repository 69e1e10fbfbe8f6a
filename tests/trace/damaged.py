"""Damage a file in many ways, read it, and print each result: `damaged.py FILE WAYS SEED`.

A third of the ways truncate the file; the others overwrite one or eight bytes. HDF5 allocates as
much memory as the stored length of a text, up to 4 GiB, before it reads the text; here its limit
is 1 GiB.
"""

import random
import resource
import signal
import sys
from pathlib import Path

SECONDS = 120  # for one


def main(path, count, seed):
    from tests.trace.test_file import everything

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    path, sound = Path(path), Path(path).read_bytes()
    damaged, chance = path.with_name("damaged.h5"), random.Random(seed)
    for number in range(int(count)):
        place = chance.randrange(len(sound) - 8)
        wild = chance.choice([bytes(8), b"\xff" * 8, chance.randbytes(8)])[: chance.choice([1, 8])]
        rest = sound[place + len(wild) :] if number % 3 else b""
        print(place, end=" ", flush=True)
        damaged.write_bytes(sound[:place] + wild + rest)
        signal.alarm(SECONDS)  # whose signal ends the process
        try:
            everything(damaged)
            print("read")
        except ValueError:
            print("refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
