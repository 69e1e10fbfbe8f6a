"""Whether all hosts of a job see the folder that it will write to.

Rank 0 leaves a key there, an empty file, for as long as it takes; the first rank of each other
node looks for it.  A job on one node leaves nothing.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpc3d.runtime.host_map import listed

if TYPE_CHECKING:
    from hpc3d.runtime.host_map import Homes
    from hpc3d.runtime.job import Job

SEEN_WITHIN = 3  # s: hosts see with a delay what others make
REMEDY = "name a folder that all hosts share (--run.out), or start in one"


def refuse_unshared(job: Job, homes: Homes, place: Callable[[], Path]) -> None:
    """Refuse the job where not all of its hosts see the folder that `place()` names on rank 0, or
    in which that folder will be made."""
    if not homes.several():
        return
    asked = place() if job.rank == 0 else None
    key = job.comm.bcast(_left_key(asked) if job.rank == 0 else None)
    if blind := _unseen(job, homes, key):
        name, first = listed([homes.hosts[rank] for rank in blind]), homes.hosts[0]
        sees = "do not see" if len(blind) > 1 else "does not see"
        where = os.path.dirname(key)
        where = "there" if where == str(asked) else f"in {where}"
        job.refuse(f"{asked}: {name} {sees} what {first} writes {where}; {REMEDY}")


def _unseen(job: Job, homes: Homes, key: str | None) -> list[int]:
    """The first ranks of the nodes that do not see the file `key`, which is gone afterwards."""
    looks = key and job.rank and job.rank in homes.leaders()
    try:
        sees = job.gather(appears(key) if looks else True)
    finally:
        if job.rank == 0 and key:
            with suppress(OSError):
                os.unlink(key)
    return [rank for rank, good in enumerate(sees) if not good]


def _left_key(folder: Path) -> str | None:
    """The name of a new empty file in `folder`, or in the first above it that exists; None where
    it cannot be written, which is said when the folder is made."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    key = there / f".hpc3d-{secrets.token_hex(8)}"
    try:
        key.touch(exist_ok=False)
    except OSError:
        return None
    return str(key)


def appears(path: Path | str) -> bool:
    """Whether a file or folder is there or comes."""
    until = time.monotonic() + SEEN_WITHIN
    while not Path(path).exists():
        if time.monotonic() > until:
            return False
        with suppress(OSError):
            os.listdir(os.path.dirname(path))  # a client of NFS then asks its server again
        time.sleep(0.1)
    return True
