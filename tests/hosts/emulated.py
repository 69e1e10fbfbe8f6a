"""Emulated hosts on one machine, connected by a bridge. Each host is a set of namespaces with its
own network, name, processes, /dev/shm, /tmp and, on request, clock. They are not visible from
outside, and end with pytest.

`hn0` is the login host, on which mpirun runs; ranks run on `hn1`, `hn2`, ... All hosts share the
files outside of /tmp, as in the file system of a cluster.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mpi import ENVIRONMENT, JOB_LOCK, ROOT

PROGRAMS = ("ip", "mpirun", "nsenter", "setpriv", "tc", "unshare")
PATH = os.pathsep.join(
    [str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]
)
PINNED = "taskset -c $(((number - 1) / {hosts_per_core})) "
MORTAL = ("setpriv", "--pdeathsig", "KILL")  # ends with pytest, however that ends
HANDED_ON = ("PATH", "PYTHONPATH", "OPENBLAS_CORETYPE")

SWITCH = """
ip link add br0 type bridge && ip link set br0 up && ip link set lo up && echo $$ || exit
exec sleep infinity
"""

# What a host does first: $1 its number, $2 the folder of all hosts, then the shared folders.  It
# says its process id as it is outside, which the /proc of outside knows.
BEGIN = """
set -e
number=$1; folder=$2; shift 2
read -r pid rest </proc/self/stat
mount --make-rprivate /
[ "$number" = 0 ] || mount -t proc proc /proc
mkdir "$folder/groups$number"; mount --rbind /sys/fs/cgroup "$folder/groups$number"
mount -t sysfs sysfs /sys; mount --rbind "$folder/groups$number" /sys/fs/cgroup
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount --bind "$folder/hosts" /etc/hosts
mkdir "$folder/tmp$number"; mount -t tmpfs -o size=2g tmpfs "$folder/tmp$number"
for each in "$folder" "$@"; do
    case $each in /tmp/*)
        own=$folder/tmp$number/${each#/tmp/}
        mkdir -p "$own"; mount --rbind "$each" "$own";;
    esac
done
mount --rbind "$folder/tmp$number" /tmp
hostname "hn$number"
ip link set lo up
echo "$pid"
set +e
trap : CHLD
while :; do sleep 1000 & wait $!; done
"""

# What ssh does: options, the name of a host, and a line for a shell with the environment of a
# login, which is not the caller's.
AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
there=$(cat {folder}/$1); number=${{1#hn}}; shift
cd /
{pinned}nsenter -t "$there" -a -- env -i HOME="$HOME" USER=root LANG=C.UTF-8 \\
    PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin sh -c "$*"
code=$?
kill -0 "$there" 2>/dev/null || code=255
exit $code
"""


@functools.cache
def available():
    """Try everything that hosts require; return the reason if hosts are impossible, or None."""
    missing = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if missing:
        return f"hosts cannot be emulated: no {', '.join(missing)} here"
    try:
        with Emulated(hosts=1, clocks=[(1, 5)]) as hosts:
            hosts.rate("1gbit")
            hosts.on(1, "true")
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        return f"hosts cannot be emulated: {getattr(error, 'stderr', None) or error}".strip()
    return None


class Emulated:
    """Hosts hn1, hn2, ... and the login host hn0, for the duration of the context.

    `clocks`: pairs (number of a host from 1, offset of its monotonic clock in seconds).
    `shared`: folders in /tmp that all hosts share; sources and environment are always shared.
    `hosts_per_core`: number of hosts that share a core; by default, hosts use all cores.
    """

    def __init__(self, hosts=2, clocks=(), shared=(), hosts_per_core=0):
        self.pinned = PINNED.format(hosts_per_core=hosts_per_core) if hosts_per_core else ""
        self.count, self.clocks = hosts, dict(clocks)
        found = [ROOT, Path(sys.prefix), *(Path(folder) for folder in shared)]
        self.shared = [str(folder.resolve()) for folder in found]
        self.pids, self.spaces = [], []

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
            self.stack = stack
            self._write()
            self.switch = self._begin(["unshare", "--net", "sh", "-c", SWITCH])
            for number in range(self.count + 1):
                self._host(number)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def _write(self):
        """Write the files of the hosts: names, and the agent with which mpirun reaches them."""
        lines = [f"{_address(number)} hn{number}" for number in range(self.count + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        agent = self.folder / "agent"
        agent.write_text(AGENT.format(folder=self.folder, pinned=self.pinned))
        agent.chmod(0o755)

    def _begin(self, words):
        """Start a process that prints its id when it is ready, and ends with the context."""
        process = subprocess.Popen(
            [*MORTAL, *words],
            env={**os.environ, "PATH": PATH},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.stack.callback(_end, process)
        said = process.stdout.readline()
        if not said:
            raise RuntimeError(process.stderr.readline().strip() or f"{words[0]} failed")
        return int(said)

    def _host(self, number):
        """Start a host on the bridge. The login host sees all processes, to reach other hosts."""
        ahead = self.clocks.get(number)
        words = ["--time", f"--monotonic={ahead}", f"--boottime={ahead}"] if ahead else []
        words += ["--pid"] if number else []
        pid = self._begin(
            ["unshare", "--net", "--uts", "--ipc", "--mount", *words, "--fork", "--kill-child"]
            + ["bash", "-c", BEGIN, "host", str(number), str(self.folder)]
            + self.shared
        )
        (self.folder / f"hn{number}").write_text(str(pid))
        self.pids.append(pid)
        self.spaces.append(os.readlink(f"/proc/{pid}/ns/pid"))
        card, own = f"v{number}", ["nsenter", "-t", str(pid), "-n", "ip"]
        bridge = ["nsenter", "-t", str(self.switch), "-n", "ip"]
        _run(*bridge, *f"link add {card} type veth peer name eth0 netns {pid}".split())
        _run(*bridge, *f"link set {card} master br0 up".split())
        _run(*own, *f"addr add {_address(number)}/24 dev eth0".split())
        _run(*own, "link", "set", "eth0", "up")

    def mpirun(self, ranks_by_host, *words, env=None, timeout=120, meanwhile=None, cwd=ROOT):
        """Run `words` with mpirun; (2, 2) means two ranks on hn1 and two on hn2.

        A hang is a failure. `env` is passed to the ranks; `None` unsets a variable. `meanwhile()`
        runs in a thread during the job; its exceptions are raised here. If processes end before
        all others have started, the launcher of Open MPI 5 hangs. Returns a CompletedProcess with
        text in stdout and stderr.
        """
        each = [f"hn{1 + place}:{count}" for place, count in enumerate(ranks_by_host) if count]
        given = {"PATH": PATH, "PYTHONPATH": str(ROOT), **(env or {})}
        settings = {**os.environ, **ENVIRONMENT, **given}
        settings = {key: text for key, text in settings.items() if text is not None}
        handed = [word for key in {*HANDED_ON, *given} & {*settings} for word in ("-x", key)]
        command = ["mpirun", "-np", sum(ranks_by_host), "--host", ",".join(each), *handed, *words]
        with JOB_LOCK, ThreadPoolExecutor(1) as pool:
            beside = pool.submit(meanwhile or (lambda: None))
            try:
                return self.launch([str(word) for word in command], settings, timeout, cwd)
            finally:
                beside.result()

    def launch(self, command, settings, timeout, cwd):
        """Run a command on the login host; after the timeout, kill everything on the hosts."""
        agent = str(self.folder / "agent")
        settings |= {"PRTE_MCA_plm_ssh_agent": agent, "OMPI_MCA_plm_rsh_agent": agent}
        process = subprocess.Popen(
            [*MORTAL, *self._enter(0, "-n", "-u", "-i", "-m"), "env", "-C", str(cwd), *command],
            env=settings,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            for number in range(1, self.count + 1):
                self.clear(number)
            out, err = process.communicate()
            raise AssertionError(f"{command} hung for {timeout} s\n{out}\n{err}") from None
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def on(self, number, *words, check=True, timeout=60):
        """Run a command on a host (0: the login host); return its output."""
        spaces = ["-a"] if number else ["-n", "-u", "-i", "-m"]
        return _run(*self._enter(number, *spaces), *words, check=check, timeout=timeout).stdout

    def _enter(self, number, *spaces):
        return ["nsenter", "-t", str(self.pids[number]), *spaces, "--"]

    def root(self, number):
        """Return the root folder of a host as seen from outside; it contains /tmp and /dev/shm."""
        return Path(f"/proc/{self.pids[number]}/root")

    def rate(self, rate, burst="128kb"):
        """Limit every network card in both directions, as in "200mbit"; None means no limit.

        After an idle time, a card sends the first `burst` at once.
        """
        for number, pid in enumerate(self.pids):
            for place, card in ((pid, "eth0"), (self.switch, f"v{number}")):
                tc = ["nsenter", "-t", str(place), "-n", "tc", "qdisc"]
                _run(*tc, "del", "dev", card, "root", check=False)
                if rate:
                    limit = f"root tbf rate {rate} burst {burst} latency 100ms".split()
                    _run(*tc, "add", "dev", card, *limit)

    def sent_and_received(self, number):
        """Return the bytes that the network card of a host has sent and received."""
        (line,) = [
            line
            for line in Path(f"/proc/{self.pids[number]}/net/dev").read_text().splitlines()
            if line.strip().startswith("eth0:")
        ]
        counts = line.split(":")[1].split()
        return int(counts[8]), int(counts[0])

    def kill(self, number):
        """Kill a host and all its processes at once."""
        os.kill(self.pids[number], signal.SIGKILL)

    def clear(self, number):
        """Kill all processes on a host; the host remains."""
        for pid in self.processes(number):
            if pid != self.pids[number]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cut(self, number):
        """Disconnect a host from the network."""
        _run("nsenter", "-t", str(self.switch), "-n", "ip", "link", "set", f"v{number}", "down")

    def mend(self, number):
        _run("nsenter", "-t", str(self.switch), "-n", "ip", "link", "set", f"v{number}", "up")

    def processes(self, number):
        """Return the processes on a host other than the login host."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns/pid") == self.spaces[number]:
                    found.append(int(path.name))
        return found

    def left(self, number):
        """Return the number of Python processes on a host."""
        count = 0
        for pid in self.processes(number):
            with contextlib.suppress(OSError):
                count += "python" in Path(f"/proc/{pid}/comm").read_text()
        return count


def _address(number):
    return f"10.77.0.{number + 1}"


def _run(*words, check=True, timeout=60):
    return subprocess.run(
        list(map(str, words)),
        env={**os.environ, "PATH": PATH},
        text=True,
        capture_output=True,
        check=check,
        timeout=timeout,
    )


def _end(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stderr.close()
