"""A fake cuBLASLt whose products are computed in stream order."""

import copy
import ctypes

from tests.fakes import fake_cublaslt
from tests.simulated_cuda.device import streams

ALGORITHM = 64  # bytes


class SimulatedLt(fake_cublaslt.FakeLt):
    def do_Matmul(self, *given):
        """Read descriptors and host scalars now, and compute the product later."""
        given, kept = list(given), copy.copy(self)
        kept.things = {
            handle: (table, dict(thing)) for handle, (table, thing) in self.things.items()
        }
        held = {2: 4, 7: 4, 12: ALGORITHM}  # alpha, beta, algorithm: bytes that they point to
        buffers = {
            at: ctypes.create_string_buffer(ctypes.string_at(given[at], size), size)
            for at, size in held.items()
        }
        stream = given[-1] or 0

        def act():
            words = [
                ctypes.addressof(buffers[at]) if at in buffers else word
                for at, word in enumerate(given)
            ]
            fake_cublaslt.FakeLt.do_Matmul(kept, *words)

        streams[stream].post("product", act)
