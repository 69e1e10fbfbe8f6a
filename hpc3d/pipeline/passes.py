"""Compiler passes that lower schedules to executable programs.

    _add_steps     add the optimizer update if the schedule has no Step
    _add_messages  add the messages between stages in a deadlock-free order; replace each B without
                   a W with BW
    _fuse          combine the messages between two passes into one group
    add_reductions add gradient reductions over the data axis, which overlap with the last backward
                   pass

Contract of a lowered schedule: the messages of a group are posted together, and the group is
complete when all of its messages are complete.  A message is complete when both the sender and the
receiver have posted it, so a valid order must not rely on buffering.  A stage runs its groups in
order, and stages are synchronized only by messages.  `check` verifies a schedule against this
contract.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, groupby, product
from operator import itemgetter

from hpc3d.pipeline.instruction import COMPUTE, MESSAGES, Instruction, Placement, paired
from hpc3d.pipeline.timeline import Cost, refuse_deadlock, timeline

Group = tuple[Instruction, ...]
# Passes that an instruction performs, if it does not perform exactly one. Each pass and each
# message may occur only once per stage.
_RESULTS = {"BW": ("B", "W"), "Reduce": (), "Step": ()}


def lower(
    streams: Iterable[Iterable[Instruction]],
    placement: Placement,
    overlap: bool = True,
    pairs: bool = False,
) -> list[list[Group]]:
    """Lower instruction streams, and return the instruction groups of each stage.

    If `pairs` is true, adjacent passes that form a pair (see `is_pair`) are one group.
    Raises ValueError if the streams deadlock; the error message lists the blocked instructions of
    the input.
    """
    complete = [_add_steps(stream) for stream in streams]
    moved = _add_messages(complete, placement, pairs)
    return [list(add_reductions(_fuse(stream, pairs), overlap)) for stream in moved]


def _add_steps(stream: Iterable[Instruction]) -> list[Instruction]:
    stream, step = list(stream), Instruction("Step")
    backward = any(instruction.op in COMPUTE[1:] for instruction in stream)
    return stream if step in stream or not backward else [*stream, step]


def _add_messages(
    streams: Iterable[Iterable[Instruction]], placement: Placement, pairs: bool
) -> list[list[Instruction]]:
    """Add the messages between stages to the instruction streams.

    The time of a message is the end time of the pass that produces it in an ideal simulation, in
    which F, B and W take one time unit and messages take none.  Sender and receiver post a message
    before their first pass that starts at or after this time: the sender right after the pass that
    produces it, the receiver no later than right before the pass that needs it.  Messages with
    equal times are ordered by sending stage and instruction, which both stages know.

    This defines a global order of all messages.  Each stage posts its messages in this order, so
    no schedule can deadlock.  Proof: Suppose that no stage can proceed.  Each unfinished stage is
    at a group with a message that its peer has not posted.  Let m be the first of all these
    messages in the global order.  The peer of m is at an earlier group, whose messages all come
    before m, and one of them has not been posted by its peer.  This contradicts the choice of m.
    The global order also fixes the order of the messages between each pair of stages, so no tags
    are needed.
    """
    rows = timeline(streams, placement, Cost(*[placement.chunks] * 3), pairs)
    posts: list[list[tuple[float, Instruction]]] = [[] for _ in rows]
    for time, stage, send in _sends(rows, placement):
        peer, receive = placement.other(stage, send)
        posts[stage].append((time, send))
        posts[peer].append((time, receive))
    return [_merged(row, post) for row, post in zip(rows, posts)]


def _sends(rows, placement):
    """Return a (time, sending stage, send instruction) tuple for each message, in global order."""
    return sorted(
        (time, stage, Instruction(f"Send{op[0]}", mb, chunk))
        for stage, row in enumerate(rows)
        for _, time, (op, mb, chunk) in row
        if op in ("F", "B", "BW") and _goes_on(placement, stage, op, chunk)
    )


@lru_cache(maxsize=1 << 16)
def _goes_on(placement, stage, op, chunk):
    neighbor = placement.neighbor(stage, chunk, 1 if op == "F" else -1)
    return neighbor is not None and neighbor[0] != stage


def _merged(row, posts):
    """Return the passes and messages of a stage in order.

    A message is placed before the first pass that starts at or after the message's time.
    """
    events = [(time, 0, message) for time, message in posts]
    events += [(start, 1, instruction) for start, _, instruction in row]
    return [instruction for *_, instruction in sorted(events, key=itemgetter(0, 1))]


def _fuse(stream: Iterable[Instruction], pairs: bool) -> Iterator[Group]:
    """Split a stream into groups of instructions.

    Consecutive messages form one group, and so do the passes of a pair if `pairs` is true; every
    other instruction is a separate group.
    """
    for moves, run in groupby(stream, key=_is_message):
        group = tuple(run)
        yield from [group] if moves else paired(group) if pairs else zip(group)


def _is_message(instruction):
    return instruction.op in MESSAGES


def add_reductions(groups: Iterable[Group], overlap: bool) -> Iterator[Group]:
    """Add a Reduce for each chunk with new gradients before each Step.

    If `overlap` is true, the Reduce joins the group of the chunk's last W or BW, so that the
    reduction overlaps with this pass.  However, if the stage then sends the result of the pass,
    the Reduce follows the SendB and overlaps with the pipeline drain, because posting the
    reduction first would delay all earlier stages.  If `overlap` is false, the Reduce is a
    separate group before the Step.
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
    """Verify the lowered streams of all stages; raise ValueError for the first error.

    Every stage must run F, B and W (or F and BW) exactly once, in this order, for each chunk and
    each of the `micros` microbatches, counted over all steps.  `passes` lists the required passes:
    "F" for an evaluation.  No pass may precede its input, every send must have a receive and vice
    versa, sender and receiver must have the same message order, and there must be no deadlock.
    """
    streams = [list(chain.from_iterable(groups)) for groups in programs]
    for stage, stream in enumerate(streams):
        _check_passes(stage, stream, placement, micros, passes)
    _check_pairs(streams, placement)
    _check_rendezvous(programs, placement)


def _check_passes(stage, stream, placement, micros, passes):
    """Check that a stage runs every pass exactly once, and not before its inputs are available."""
    done: dict[tuple[str, int], set[int]] = defaultdict(set)  # microbatches by (op, chunk)
    kinds = {}  # needs and results, which are the same for all microbatches
    for instruction in stream:
        op, mb, chunk = instruction
        if (op, chunk) not in kinds:
            needs = _needs_here(stage, instruction, placement)
            kinds[op, chunk] = (
                [(done[need.op, need.chunk], need) for need in needs],
                [(done[part, chunk], part) for part in _RESULTS.get(op, (op,))],
            )
        needs, results = kinds[op, chunk]
        for found, need in needs:
            if mb not in found:
                raise ValueError(
                    f"stage {stage}: {instruction} before {need._replace(mb=mb)}, which must come "
                    "first"
                )
        for found, part in results:
            if mb in found:
                again = Instruction(part, mb, chunk)
                raise ValueError(f"stage {stage}: {instruction} computes {again} a second time")
            found.add(mb)
    _check_complete(stage, done, product(passes, range(placement.chunks)), micros)


def _check_complete(stage, done, kinds, micros):
    """Check that a stage has run the passes of each (op, chunk) in `kinds`, and no others.

    `done` maps (op, chunk) to microbatches.
    """
    every = {*range(micros)}
    wanted = dict.fromkeys(kinds, every)
    missing = ((op, mb, chunk) for op, chunk in wanted for mb in every - done[op, chunk])
    for each in sorted(missing):
        raise ValueError(f"stage {stage}: {Instruction(*each)} is missing")
    others = {kind: found - wanted.get(kind, set()) for kind, found in done.items()}
    extra = ((op, mb, chunk) for (op, chunk), found in others.items() for mb in found)
    for each in sorted(each for each in extra if each[0] in COMPUTE):
        raise ValueError(
            f"stage {stage}: {Instruction(*each)} is not among the {micros} microbatches"
        )


def _needs_here(stage, instruction, placement):
    """Return the passes and receives on this stage that an instruction depends on."""
    op, mb, chunk = instruction
    if op.startswith("Send"):
        return [Instruction(op[-1], mb, chunk)]
    return [
        need if peer == stage else Instruction(f"Recv{op[0]}", mb, chunk)
        for peer, need in placement.needs(stage, instruction)
    ]


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
    # `_check_passes` already reports a send without a receive, because an input is missing.
    for pair in sorted(sent.keys() | received.keys()):
        if received[pair] == sent[pair]:
            continue
        sender, receiver = pair
        for send, receive in sorted(set(received[pair]) - set(sent[pair])):
            raise ValueError(
                f"stage {receiver}: {receive} has no matching {send} on stage {sender}"
            )
        for (send, due), (_, receive) in zip(sent[pair], received[pair]):
            if due != receive:
                raise ValueError(
                    f"stage {sender} sends {send} when stage {receiver} expects {receive}: "
                    "both stages must post their messages in the same order"
                )


def _check_rendezvous(programs, placement):
    """Raise ValueError if the stages would deadlock with unbuffered (rendezvous) messages.

    The stages of each pair post the same messages in the same order.
    """
    programs = [[group for group in each if any(map(_is_message, group))] for each in programs]
    heads, moved = [0] * len(programs), True
    posted: Counter[tuple[int, int, bool]] = Counter()  # by (stage, peer, whether it sends)
    awaited: dict[int, list] = {}  # by stage: counts that complete its current group
    while moved:
        moved = False
        for stage, groups in enumerate(programs):
            while heads[stage] < len(groups):
                if stage not in awaited:
                    awaited[stage] = _posted(posted, stage, groups[heads[stage]], placement)
                if any(posted[other] < count for other, count in awaited[stage]):
                    break
                del awaited[stage]
                heads[stage] += 1
                moved = True
    refuse_deadlock(
        {
            stage: "+".join(map(str, groups[head]))
            for stage, (groups, head) in enumerate(zip(programs, heads))
            if head < len(groups)
        }
    )


def _posted(posted, stage, group, placement):
    """Post the messages of a group of a stage, and return what completes them.

    `posted` counts messages by (stage, peer, whether the stage sends). The result lists keys of
    `posted` and the counts that they must reach.
    """
    awaited = []
    for message in filter(_is_message, group):
        peer, _ = placement.other(stage, message)
        sends = message.op in ("SendF", "SendB")
        posted[stage, peer, sends] += 1
        awaited.append(((peer, stage, not sends), posted[stage, peer, sends]))
    return awaited
