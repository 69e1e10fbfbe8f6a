"""Run simulated pipeline stages in threads, one at a time.

A stage runs until it needs a time that another stage has not computed yet. Then a different stage
resumes, so the threads never compete for the interpreter lock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from threading import Lock, Thread
from typing import Any

_Letter = tuple[int, int, int]  # (sender, receiver, index of the message from one to the other)


class _StageStopped(Exception):
    """Raised in a stage that waits for a stage that has failed."""


class StageTurns:
    """Simulated pipeline stages, which take turns and exchange times in ns.

    `mail` maps each message that has been sent to its time. `ready` lists the stages that can
    continue, and `blocked` maps each waiting stage to the message that it waits for, or to `None`
    if it waits for all other stages.
    """

    def __init__(self, stages: int) -> None:
        self.turns = [Lock() for _ in range(stages)]  # a stage runs when it acquires its lock
        for turn in self.turns:
            turn.acquire()
        self.mail: dict[_Letter, int] = {}
        self.ready, self.blocked = deque(range(stages)), dict[int, _Letter | None]()
        self.times: list[int] = []  # arrival times of the stages that wait for all others
        self.last = 0  # the latest of these times in the previous exchange
        self.errors: list[BaseException] = []

    def run(self, function: Callable[[StagePeers], Any]) -> list[Any]:
        """Call `function(peers)` for each stage; return the results in the order of the stages.

        If a stage raises an exception, the other stages stop and the caller receives it.
        """
        if len(self.turns) == 1:
            return [function(self.peers(0))]
        results: list[Any] = [None] * len(self.turns)

        def work(stage):
            self.turns[stage].acquire()
            try:
                if not self.errors:
                    results[stage] = function(self.peers(stage))
            except BaseException as error:
                self._fail(error)
            self._hand_over()

        # Daemon threads, so that an interrupted simulation does not keep the process alive.
        threads = [Thread(target=work, args=(n,), daemon=True) for n in range(len(self.turns))]
        for thread in threads:
            thread.start()
        self._hand_over()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return results

    def peers(self, stage: int) -> StagePeers:
        return StagePeers(self, stage)

    def deliver(self, letter: _Letter, time: int) -> None:
        self.mail[letter] = time
        receiver = letter[1]
        if self.blocked.get(receiver) == letter:
            del self.blocked[receiver]
            self.ready.append(receiver)

    def take(self, letter: _Letter) -> int:
        """Wait for a message, and return its time."""
        if letter not in self.mail:
            self._wait(letter[1], letter)
        return self.mail.pop(letter)

    def latest(self, stage: int, time: int) -> int:
        """Wait until every stage has called this method; return the latest time."""
        self.times.append(time)
        if len(self.times) < len(self.turns):
            self._wait(stage, None)
        else:
            self.last, self.times = max(self.times), []
            self._resume_all()
        return self.last

    def _wait(self, stage: int, letter: _Letter | None) -> None:
        self.blocked[stage] = letter
        self._hand_over()
        self.turns[stage].acquire()
        if self.errors:
            raise _StageStopped

    def _hand_over(self) -> None:
        """Let the next stage run, if any is left."""
        if self.blocked and not self.ready:
            stages = ", ".join(map(str, sorted(self.blocked)))
            self._fail(RuntimeError(f"deadlock: the simulated stages {stages} cannot proceed"))
        if self.ready:
            self.turns[self.ready.popleft()].release()

    def _fail(self, error: BaseException) -> None:
        self.errors.append(error)
        self._resume_all()

    def _resume_all(self) -> None:
        self.ready.extend(self.blocked)
        self.blocked.clear()


class StagePeers:
    """Exchange of times between one of the simulated stages, number `rank`, and the others."""

    def __init__(self, turns: StageTurns, rank: int) -> None:
        self.turns, self.rank, self.size = turns, rank, len(turns.turns)
        self.sent, self.awaited = Counter[int](), Counter[int]()

    def send(self, time: int, peer: int) -> None:
        """Send a time in ns to stage `peer`."""
        self.turns.deliver((self.rank, peer, self.sent[peer]), time)
        self.sent[peer] += 1

    def recv(self, peer: int) -> Callable[[], int]:
        """Return a function that waits for the next time from stage `peer`, and returns it."""
        letter = peer, self.rank, self.awaited[peer]
        self.awaited[peer] += 1
        return partial(self.turns.take, letter)

    def latest(self, time: int) -> int:
        """Return the latest time that a stage passes to this call, which all stages make."""
        return self.turns.latest(self.rank, time)
