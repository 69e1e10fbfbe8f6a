"""Peak memory of this process."""

import re
from pathlib import Path


def peak_bytes():
    """The high-water mark of this program: `ru_maxrss` would count what forked it, too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
