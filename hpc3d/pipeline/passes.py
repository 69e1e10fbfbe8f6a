"""Passes that lower schedules to executable programs: stream in, stream out.

    add_steps      the optimizer, if the schedule has no Step
    add_messages   between stages, in an order without deadlock; a B without a W becomes BW
    fuse           the messages between two passes become one group
    add_reductions gradient reductions over the data axis, overlapped with the last backward pass

Contract of a lowered schedule: the messages of a group are posted together, and the group is
complete when all of them are.  A message is complete when both ends have posted it.  A stage runs
its groups in order, and nothing else orders them, so no order may rely on buffering.  `check`
verifies a schedule against this contract.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, product

from hpc3d.pipeline.instruction import COMPUTE, MESSAGES, Instruction, Placement
from hpc3d.pipeline.timeline import Cost, refuse_deadlock, timeline

Group = tuple[Instruction, ...]


def lower(
    streams: Iterable[Iterable[Instruction]], placement: Placement, overlap: bool = True
) -> list[list[Group]]:
    """Return the groups of each stage after all passes.

    Raises ValueError, with the original names of the instructions, if the streams deadlock.
    """
    complete = [_add_steps(stream) for stream in streams]
    moved = _add_messages(complete, placement)
    return [list(add_reductions(_fuse(stream), overlap)) for stream in moved]


def _add_steps(stream: Iterable[Instruction]) -> list[Instruction]:
    """Return the stream with a final Step, unless it has Steps or no gradients."""
    stream, step = list(stream), Instruction("Step")
    backward = any(instruction.op in COMPUTE[1:] for instruction in stream)
    return stream if step in stream or not backward else [*stream, step]


def _add_messages(
    streams: Iterable[Iterable[Instruction]], placement: Placement
) -> list[list[Instruction]]:
    """Return the streams with the messages between stages that their passes need.

    The time of a message is the end of the pass that produces it, on an ideal clock where F, B and
    W take 1 and messages nothing.  Both ends post it before the first pass that starts then or
    later: the sender right after the pass that produces it, the receiver no later than right
    before the pass that needs it.  Messages with equal times are ordered by sender and content,
    which both ends know.

    All messages therefore have one order, each stage posts its own in this order, and no schedule
    can deadlock.  Proof: suppose that no stage can proceed.  Each unfinished stage is at a group
    with a message that its peer has not posted; let m be the first of all these messages.  The
    peer is at a group before m, whose messages all come before m, and one of them is not posted by
    its own peer either: then m was not the first.  It also follows that each pair of stages has
    one order for its messages, so no tags are needed.
    """
    rows = timeline(streams, placement, Cost(*[placement.chunks] * 3))
    posts: list[list[tuple[float, Instruction]]] = [[] for _ in rows]
    for time, stage, send in _sends(rows, placement):
        peer, receive = placement.other(stage, send)
        posts[stage].append((time, send))
        posts[peer].append((time, receive))
    return [list(_merged(row, post)) for row, post in zip(rows, posts)]


def _sends(rows, placement):
    """Return (time, stage, send) for all messages, in their global order."""
    return sorted(
        (time, stage, Instruction(f"Send{op[0]}", mb, chunk))
        for stage, row in enumerate(rows)
        for _, time, (op, mb, chunk) in row
        if op in ("F", "B", "BW") and _goes_on(placement, stage, op, chunk)
    )


def _goes_on(placement, stage, op, chunk):
    """Return True if another stage has the part that uses the result of a pass."""
    neighbor = placement.neighbor(stage, chunk, 1 if op == "F" else -1)
    return neighbor is not None and neighbor[0] != stage


def _merged(row, posts):
    """Yield the instructions of a row, each after the messages up to its start time."""
    posts = iter([*posts, (float("inf"), None)])
    time, message = next(posts)
    for start, _, instruction in row:
        while time <= start:
            yield message
            time, message = next(posts)
        yield instruction
    while message:
        yield message
        time, message = next(posts)


def _fuse(stream: Iterable[Instruction]) -> Iterator[Group]:
    """Yield groups: the messages between two other instructions form one, each other instruction
    forms its own."""
    for moves, run in groupby(stream, key=_is_message):
        group = tuple(run)
        yield from [group] if moves else zip(group)


def _is_message(instruction):
    return instruction.op in MESSAGES


def add_reductions(groups: Iterable[Group], overlap: bool) -> Iterator[Group]:
    """Add a Reduce of each chunk with new gradients before each Step.

    With `overlap`, the Reduce joins the last W or BW of the chunk, so that reductions overlap with
    this pass.  If another stage waits for the message after the pass, the Reduce follows that
    message, because posting the reductions first would delay all earlier stages.  These stages
    overlap their reductions with the drain.  Without `overlap`, the Reduce is a separate group
    before the Step.
    """
    return _reduced_early(groups) if overlap else _reduced_late(groups)


def _reduced_early(groups):
    reduced: set[int] = set()
    found: list[Group] = []
    for group in reversed(list(groups)):
        op, mb, chunk = group[0]
        if op == "Step":
            reduced.clear()
        elif op in ("W", "BW") and chunk not in reduced:
            reduced.add(chunk)
            reduce = (Instruction("Reduce", chunk=chunk),)
            if found and Instruction("SendB", mb, chunk) in found[-1]:
                found.insert(-1, reduce)
            else:
                group += reduce
        found.append(group)
    return reversed(found)


def _reduced_late(groups):
    chunks = set()
    for group in groups:
        op, _, chunk = group[0]
        if op in ("W", "BW"):
            chunks.add(chunk)
        elif op == "Step":
            yield from ((Instruction("Reduce", chunk=chunk),) for chunk in sorted(chunks))
            chunks.clear()
        yield group


def check(
    programs: Sequence[Sequence[Group]], placement: Placement, micros: int, passes: str = "FBW"
) -> None:
    """Run the lowered streams of all stages by the contract; ValueError for the first error.

    Every stage runs F, B and W, or BW, of all `micros` microbatches (of all steps together) and
    chunks once and in this order; `passes` restricts the check to the passes that exist.  No pass
    precedes its input, every receive has a send and every send a receive, both ends of a pair of
    stages have the same message order, and there is no deadlock.
    """
    streams = [list(chain.from_iterable(groups)) for groups in programs]
    for stage, stream in enumerate(streams):
        _check_passes(stage, stream, placement, micros, passes)
    _check_pairs(streams, placement)
    _check_rendezvous(programs, placement)


def _check_passes(stage, stream, placement, micros, passes):
    """Check that a stage runs all passes once, after their local inputs and their receives."""
    done = set()
    for instruction in stream:
        for need in _needs_here(stage, instruction, placement):
            if need not in done:
                raise ValueError(
                    f"stage {stage}: {instruction} before {need}, which must come first"
                )
        for each in _results(instruction):
            if each in done:
                raise ValueError(f"stage {stage}: {instruction} computes {each} a second time")
            done.add(each)
    every = product(passes, range(micros), range(placement.chunks))
    wanted = {Instruction(*each) for each in every}
    for missing in sorted(wanted - done):
        raise ValueError(f"stage {stage}: {missing} is missing")
    for extra in sorted(each for each in done - wanted if each.op in COMPUTE):
        raise ValueError(f"stage {stage}: {extra} is not among the {micros} microbatches")


def _needs_here(stage, instruction, placement):
    """Return the required predecessors on the same stage: passes, or receives of remote
    results."""
    op, mb, chunk = instruction
    if op.startswith("Send"):
        return [Instruction(op[-1], mb, chunk)]
    return [
        need if peer == stage else Instruction(f"Recv{op[0]}", mb, chunk)
        for peer, need in placement.needs(stage, instruction)
    ]


def _results(instruction):
    """Return the passes or messages that may occur only once; BW counts as B and W."""
    op, mb, chunk = instruction
    if op in ("Reduce", "Step"):
        return []
    return [Instruction(part, mb, chunk) for part in ("BW" if op == "BW" else [op])]


def _check_pairs(streams, placement):
    """Check that each pair of stages sends and receives the same messages in the same order."""
    sent, received = defaultdict(list), defaultdict(list)
    for stage, stream in enumerate(streams):
        for instruction in filter(_is_message, stream):
            peer, other = placement.other(stage, instruction)
            if instruction.op in ("SendF", "SendB"):
                sent[stage, peer].append((instruction, other))
            else:
                received[peer, stage].append((other, instruction))
    for pair in sorted(sent.keys() | received.keys()):
        sender, receiver = pair
        _check_pair(sender, receiver, sent[pair], received[pair])


def _check_pair(sender, receiver, sent, received):
    # Each send has its receive; otherwise a pass of the receiver would precede its input.
    for send, receive in sorted(set(received) - set(sent)):
        raise ValueError(f"stage {receiver}: {receive} has no matching {send} on stage {sender}")
    for (send, due), (_, receive) in zip(sent, received):
        if due != receive:
            raise ValueError(
                f"stage {sender} sends {send} when stage {receiver} expects {receive}: "
                "both stages must post their messages in the same order"
            )


def _check_rendezvous(programs, placement):
    """Run the groups until none can proceed; raise ValueError if some are left."""
    heads, moved = [0] * len(programs), True
    posted: set[tuple[int, Instruction]] = set()
    while moved:
        moved = False
        for stage, groups in enumerate(programs):
            while heads[stage] < len(groups):
                messages = list(filter(_is_message, groups[heads[stage]]))
                posted.update((stage, message) for message in messages)
                if not all(placement.other(stage, message) in posted for message in messages):
                    break
                heads[stage] += 1
                moved = True
    refuse_deadlock(
        {
            stage: "+".join(map(str, groups[head]))
            for stage, (groups, head) in enumerate(zip(programs, heads))
            if head < len(groups)
        }
    )
