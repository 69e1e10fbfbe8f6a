"""The rules of the optimisers' kernels for arrays of a device (hpc3d.model.device)."""

from functools import partial

import numpy as np

from hpc3d.model.device import RULES, Rules
from hpc3d.training import optimizer

WORKSPACE = 32 << 20  # bytes that cuBLASLt may take for a product, as NVIDIA advises for Hopper


UPDATES = {**RULES, optimizer: ("adamw", "descend")}


class Updates(Rules):
    """Factors that change from step to step are read from the device's memory."""

    rules = UPDATES

    def adamw(self, value, master, grad, first, second, constants, factors):
        given = {"first": first, "second": second, "factors": self.bring(np.float32(factors))}
        given |= {"beta1": constants.BETA1, "beta2": constants.BETA2}
        given |= {"epsilon": constants.EPSILON, "size": grad.size}
        self.launch("adamw", 1, grad.size, value=value, master=master, grad=grad, **given)

    def descend(self, value, master, grad, factors):
        given = {"factors": self.bring(np.float32(factors)), "size": grad.size}
        self.launch("descend", 1, grad.size, value=value, master=master, grad=grad, **given)


def use(pool, tf32=False):
    """Let CuPy's arrays take these rules, with workspaces of `pool`; what does attention."""
    from hpc3d.cuda.cublaslt import Lt
    from hpc3d.cuda.cudnn_attention import Flash
    from hpc3d.cuda.kernel_loader import Kernels

    device, flash = pool.device, None
    workspace = pool.empty((WORKSPACE,), np.uint8, "workspace")
    lt = Lt(device.compute.ptr, (workspace.data.ptr, WORKSPACE), tf32)
    missing = Flash.missing()
    if not missing:
        flash = Flash(pool.empty, device.compute.ptr, device.capability)
    empty = partial(pool.empty, kind="workspace")
    rules = Updates(Kernels(), lt.product, flash, empty, pool.bring)
    rules.workspace = workspace  # lt has its address alone
    rules.register(device.array_type)
    return f"attention by products: no {missing}" if missing else "attention by cuDNN"
