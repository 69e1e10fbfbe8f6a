"""A recorder whose rows stay in memory, where they can be taken out and put in again."""

import numpy as np

from hpc3d.trace.events import EVENTS, record_type
from hpc3d.trace.recorder import ROW, Recorder

ROWS = record_type(EVENTS)
ROOM = 1 << 14  # rows that one pass may have


class Ledger(Recorder):
    """A recorder of rank `rank` that reads `clock` [ns] and never writes a file."""

    def __init__(self, rank, clock):
        super().__init__(None, {"rank": rank}, ROOM, every_s=float("inf"), clock=clock)

    def make_room(self, rows=ROOM):
        """Space for as many rows more, and for a pass."""
        if self.count + rows + ROOM > self.capacity:
            self.capacity = 2 * (self.count + rows + ROOM)
            self.table.extend(bytes(self.capacity * ROW.size - len(self.table)))

    def rows(self, first=0):
        """A copy of the rows from number `first` on."""
        return np.frombuffer(self.table, ROWS, self.count)[first:].copy()

    def add(self, rows):
        self.make_room(len(rows))
        end = self.count + len(rows)
        self.table[self.count * ROW.size : end * ROW.size] = rows.tobytes()
        self.count = end

    def flush(self):
        """Nothing: the rows stay."""
