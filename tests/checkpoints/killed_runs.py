"""A small run that saves a checkpoint every step, in processes that end too early."""

import os
import signal
import sys
import threading

from hpc3d.checkpoints.resume import resume
from hpc3d.checkpoints.saver import Saver
from hpc3d.checkpoints.sharded import steps_of
from hpc3d.comm.threads import run
from hpc3d.config.input_file import CheckpointConfig
from hpc3d.config.load import to_toml
from hpc3d.console.sanitize import Problems
from hpc3d.training.run_folder import clear
from tests.pipeline.mixes import config_of, trainer_of

LAYOUTS = {
    "serial": "batch=8 layers=1 schedule=none microbatches=1 decay=constant",
    "x=2": "x=2 scheme=1d batch=8 layers=1 microbatches=1 decay=constant",
    "uneven": "p=2 layers_per_stage=[2,0] batch=8 layers=2 microbatches=1 decay=constant",
    "mixture": "experts=2 batch=8 layers=1 schedule=none microbatches=1 decay=constant",
}
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")  # audit events; and open, to write


class ThreadJob:
    """Job whose ranks are threads, with the methods that `resume` calls."""

    def __init__(self, mesh):
        self.mesh, self.rank, self.size = mesh, mesh.rank, mesh.ranks

    def gather(self, value):
        if self.size == 1:
            return [value]
        values = [*self.mesh.world.share(value)]
        self.mesh.world.group.barrier.wait()
        return values

    def from_root(self, function):
        return self.gather(function() if self.rank == 0 else None)[0]

    def refuse(self, *problems):
        raise Problems(problems)


def run_until(folder, layout, until, every=1, evaluations=None, steps=10**6):
    """Continue the run in `folder` until step `until`, and save after every `every` steps.

    Rank 0 appends the losses to the file `losses`, and log lines to `said`. The best checkpoint
    according to `evaluations`, {completed steps: loss}, is kept. The run has `steps` steps.
    """
    clear(folder)
    config = config_of(f"{LAYOUTS[layout]} steps={steps}")
    plain, losses = {"run_id": folder.name, "config": to_toml(config)}, evaluations or {}

    def header(done):
        known = [(loss, step) for step, loss in losses.items() if step <= done]
        best = {"best": dict(zip(("loss", "step"), min(known)))} if known else {}
        return plain | {"position": None} | best

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        say = note(folder / "said", mesh)
        begun = steps_of(folder / "checkpoints")
        start = resume(ThreadJob(mesh), folder, trainer, say) if begun else 0
        how = CheckpointConfig(every=every, keep=2, keep_best=bool(evaluations))
        saver = Saver(folder, trainer, how, header, say, resumed=bool(begun))
        for number in range(start, until):
            note(folder / "losses", mesh)(f"{number} {trainer.step(number).loss!r}")
            best = header(number + 1).get("best", {})
            saver.after(number, best.get("step") == number + 1)
        saver.wait()

    run(config.sizes(), rank)


def note(path, mesh):
    """Return a function that appends a line to a file at once, on rank 0."""

    def add(line):
        if mesh.rank == 0:
            with path.open("ab", buffering=0) as file:
                file.write(f"{line}\n".encode())

    return add


def losses(folder):
    """Return {step: all recorded losses of the step, as texts}."""
    found = {}
    for line in (folder / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


def child(function, *arguments):
    """Call a function in a forked copy of this process; return the process id of the copy.

    An error in it, of the first thread that fails, goes to standard error; the exit code is 1.
    """
    if process := os.fork():
        return process
    first = threading.Lock()

    def fail(error):
        first.acquire()  # and nobody after it
        print(error, file=sys.stderr, flush=True)
        os._exit(1)

    threading.excepthook = lambda args: fail(args.exc_value)
    try:
        function(*arguments)
    except BaseException as error:
        fail(error)
    os._exit(0)


def ended(process):
    """Return the exit code of a child, or the negative signal number."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def at_write(number, act, within="/checkpoints/"):
    """Call `act(path)` before the `number`-th operation of this process that opens (for writing),
    syncs (path None), renames or removes a file. Only opened paths that contain `within` count.
    Returns the list of all paths. The process should end afterwards."""
    paths, lock, fsync = [], threading.Lock(), os.fsync

    def point(path):
        with lock:
            paths.append(path)
            now = len(paths) == number
        if now:
            act(path)

    def audit(event, arguments):
        opened = event == "open" and writes(*arguments) and within in arguments[0]
        if event in WRITES or opened:
            point(os.fspath(arguments[0]))

    def synced(descriptor):
        point(None)
        fsync(descriptor)

    os.fsync = synced
    sys.addaudithook(audit)
    return paths


def writes(path, _, flags):
    """Return True if a file is opened for writing."""
    return isinstance(path, str) and bool(flags & (os.O_WRONLY | os.O_RDWR))
