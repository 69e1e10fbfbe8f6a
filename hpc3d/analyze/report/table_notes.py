"""What the numbers of a report mean, table by table, in the words of their headings.

Words between ` are headings of the table.  How the numbers come about is said where they do.
"""

GENERAL = """\
A training step has a forward pass, which computes the loss from the text, a backward pass,
which computes how the loss changes with every weight, and the optimiser, which changes the
weights.

Times, calls and bytes are means over the ranks and steps of a run, unless a table has a row
for each or its heading says median. The first step that was recorded is left out where there
are others, for it warms up: memory is touched for the first time, connections are made. What
heads a run says which steps its averages are over. Losses, what is done between steps and the
peaks of memory are of all steps.

A dash stands for what is not known. Where a pass or a call encloses other events, its own
time is what these leave. The files in tables/ have the same numbers in seconds, bytes and
floating-point operations (FLOP), without prefixes."""

MEANING = {
    "runs": """\
`step [ms]` is the median over the steps of the slowest rank, with the quartiles `25 % [ms]`
and `75 % [ms]`, and `tokens/s` the tokens of a
step over this time. `communication` is the part of the ranks' time that went into calls:
collectives and messages. `received [B]` is what a rank must receive in a step under
algorithms that are optimal in bandwidth.

`loss [nat]` is that of the last step that all runs have, `loss after step`. The `largest
difference [nat]` from the loss of the first run, in any step, says whether two layouts train
the same model.""",
    "received": """\
What a rank receives in a step of each run along a mesh axis, under algorithms that are optimal in
bandwidth; by which part that is more or less than in the first run, its `difference`; and the
`time [ms]` that a rank is in these calls. The file has the columns of the runs under their
places, from 1, as bytes_2.""",
    "scaling": """\
`forward [ms]` and `backward [ms]` are the time of a mean rank in its forward and backward
passes, of all microbatches; `average step time [ms]` is their sum over `batch`, the sequences
of a step, as arXiv:2105.14450 defines it. That leaves out the messages between stages, the
reduction of gradients over replicas and the optimiser. `tokens/s` and `tokens/s a rank` are those
of whole steps.

`scaling` is strong where a run does the same work as the first one, weak where a rank does as
much work as a rank of the first one (parameters of the blocks times tokens, within a tenth),
and other where neither holds, or models, types of numbers or optimisers differ. `speed-up` is
how many times as long a step of the first run takes; in weak scaling it is the rate of
floating-point operations over that of the first run, and blank for another load. It
lies between `from` and `to` with 95 % confidence (of a ratio of medians over 6 steps or more,
taken for independent). `efficiency` is the speed-up over the ratio of the ranks.""",
    "gains": """\
`loops cut` says in how many dimensions the products are really cut. `over 1-D` is how many
times as long as in this run the `average step time [ms]` is in the best 1-D run, of the same
model, batch, type of numbers, optimiser, ranks, stages and replicas; `over 2-D` the same of
2-D. arXiv:2105.14450 reports 2.32 and 1.57 for 3-D on 64 ranks. `step over 1-D` and `step
over 2-D` compare `step [ms]`, the whole step of the slowest rank, optimiser and all. `from`
and `to` after a ratio are its 95 % interval, as for the speed-up.""",
    "differences": """\
What takes longer than in the first run: the time of a step in both, and the `difference
[ms]`, which lies between `from [ms]` and `to [ms]` with 95 % confidence (Welch's interval
over the steps, taken for independent).""",
    "step": """\
`min [ms]`, `25 % [ms]`, `median [ms]`, `75 % [ms]` and `max [ms]` are over the `steps` that
are averaged, of the numbers `from` and `to`, each that of its slowest rank.
`forward [ms]` is the time of a mean rank in forward passes and `backward [ms]` that in
backward passes, with the calls inside of them, but without what stages send each other, sums
over replicas and the optimiser. `tokens/s` is the tokens of a step over the median, and
`communication` the part of the ranks' time that went into calls.""",
    "efficiency": """\
`model [FLOP]` are the floating-point operations that a step of this model needs, by equation
7 of arXiv:2205.05198: 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)) for B sequences of s
tokens, L layers of width h and a vocabulary of V, or their like in another family; of experts
those count that a token goes to. `recorded [FLOP]` are those of the products and the attention
that the ranks recorded: more where something is computed again, the vocabulary padded, or a slot
of an expert empty; fewer where a token is dropped, or attention goes chunk by chunk, for
`model [FLOP]` has the masked half of its square, and chunks that a mask hides are left out. Over
the median step they give `model [FLOP/s]` and `recorded [FLOP/s]`, and over the peak rate of all
ranks (--peak) `MFU` and `HFU`, the utilisation of the hardware by the model and by all that was
done.""",
    "prediction": """\
What python -m hpc3d.simulate predicted of this run, and what was measured. `predicted /
measured` below 1 means that the run took more than predicted. step_s is the median step of
the slowest rank [s], peak_KIND_bytes the highest peak of a kind of memory on a rank [B].""",
    "loss": """\
The mean loss of a token after each step, and the `norm of the gradient` before it is clipped.""",
    "evaluation": """\
What the model was worth on text that it is not trained on, after some steps: the mean loss of
the `tokens` that count, the `perplexity` exp(loss), and the `accuracy`, the share of the
tokens to which the model gives the highest probability. The `time [ms]` of an evaluation is
no part of a step.""",
    "time": """\
Where the `time [ms]` of a mean step goes. `category` is what a rank did: compute, comm (the
wait for the result of a call), copy (a call that is waited for later), optimizer, io (reading
the text). unrecorded is the rest of the step, of which no event tells. `phase` is the part of
the step, `axis` the mesh axis that a call goes along, `operation` what was computed or
called. `received [B]` counts nothing for what is sent, since another rank receives it. `rate
[FLOP/s]` is that of a rank.""",
    "between": """\
What ranks did between steps, which the time of no step has. Saving is a snapshot of the
state, and a checkpoint where a rank waits until one is on disk; a thread writes it meanwhile.
`times` is how often a rank did it, `mean [ms]` and `longest [ms]` are of one, and `in all
[ms]` is the sum on a rank.""",
    "layers": """\
The time of a step by Transformer layer; the ends are what lies before the first and after the
last one: embedding, head and loss, and the optimiser.""",
    "ranks": """\
`step [ms]` is made of `compute [ms]` (with the optimiser), `wait [ms]` and `transfer [ms]`
(blocked in a call before and after the last member came, together `exposed [ms]`), `copy
[ms]` (calls that are waited for later), `other [ms]` (reading, and what has no other name)
and `unrecorded [ms]`.

`a call outstanding [ms]` is the part of `compute [ms]` in which the rank had made a call that
it did not wait for yet. The call may have been over long before, so this is an upper bound of
the communication that computation hides.""",
    "imbalance": """\
The computation of the busiest rank over that of the mean one: `max / mean` is 1 where all
ranks have the same to do.""",
    "waits": """\
A rank is `blocked [ms]` from when it waits for the result of a call until it has it. `wait
[ms]` is the part before the last member has come, `transfer [ms]` the part after. A broadcast
waits for its root only. Violations are calls that ended before a member came that they need:
then the clocks of two hosts disagree, by `worst [us]` at least.""",
    "stragglers": """\
`arrives last` is in how many of its `meetings`, collectives and messages, a rank was the last
to come. `others wait for it [ms]` sums over all other ranks, in a step. A rank may be late
because it waited for another one before: the critical path tells. `works [ms]` is the median
step without what the rank is blocked in calls. A rank is a `straggler` if that is longer than
of every other rank in more steps than chance would have it (5 %, where all are alike), and by
a hundredth of a step more than the median of the others; a dash stands where there are too few
steps to tell that from chance.""",
    "path": """\
What would have to be faster for the step to be faster: from its end back, the path follows
the rank that works, and from a wait it goes on with the rank that was waited for. So its
pieces lie end to end and no wait is among them. host is time between two events.""",
    "collectives": """\
`median [us]` is the time from the arrival of the last member to the end of the call. `size
[B]` is the whole array, `algbw [B/s]` that over the time, and `busbw [B/s]` algbw times
(n-1)/n, for all-reduce 2(n-1)/n, of n members: the rate of each member's link (nccl-tests).
`waited for later` is the share of calls in which a rank did something else before it asked
for the result; then the end may seem late.""",
    "traffic": """\
Whose data goes to whom in a step, whatever way the library sends it: what is broadcast comes
from the root, what is reduced goes to it, and in other collectives all members send equal
parts.""",
    "crossing": """\
Of the ranks of a host, in a step: calls with ranks of other hosts, `received [B]` by the
formulas of the trace, and what of that is data `from other hosts [B]`. `on cards [B]` is what
the host's card receives: long blocks of a group with as many ranks on each of its h hosts
cross once a host and are shared there, so of an all-gather and a reduce-scatter (h-1)/h of the
whole block, of an all-reduce twice that, of a broadcast and a reduction the block; other
groups send as MPI does, each rank for itself at most.""",
    "crossing_pairs": """\
The bytes from rank to rank, summed over the ranks of each host: whose data goes to whom in a
step. On the diagonal is what stays on a host.""",
    "pipeline": """\
Milliseconds of a stage in its forward passes `F [ms]` and its backward passes: `BW [ms]`
whole, or `B [ms]` for the gradient of the input and `W [ms]` for those of the weights. `idle`
is the share of the time from the first to the last pass of all stages in which the stage is
in none; `idle, simulated` that of the schedule on a clock where messages take no time and all
stages the same. `in flight` are the microbatches whose backward pass is still to come, at
most.""",
    "bubble": """\
The idle time of a stage in three parts: `warm-up [ms]` before its first backward pass, `drain
[ms]` after its last forward pass, and `steady [ms]` between. `all passes [ms]` is the time
from the first to the last pass of all stages.""",
    "expert_cost": """\
Every expert has as many `slots` in a step, for all sequences together, and computes all of them:
so no product takes longer because the fullest expert has `fullest / mean` times the choices of
the mean one (the mean over steps and layers). What that costs are the choices that are
`dropped`, for their expert has no slot left, and the `empty slots`, as far as they are more than
if all experts had the same: `dropped, even` and `empty slots, even`. `empty [FLOP]` is what the
products of empty slots are in a step, forward and backward. `wait along e [ms]` is the time that
a mean rank waits in dispatch and combine, and `of the step` its share; it waits longest `for
rank`, which is the one `with experts` of these numbers in every layer. `their load` is the
tokens in the slots of these over those of as many mean ones: near 1, they are not what is waited
for.""",
    "experts": """\
Over the steps that are averaged: the `share of choices` that fell on an expert, its `load`, which
is that share times the number of experts, so 1 where all have the same, the choices of it that
were `dropped`, and its `empty slots`.""",
    "routers": """\
The load of the experts of a layer in every step: that of the `fullest expert`, `fullest / mean`,
and that of the emptiest one, `emptiest / mean`; of all choices those that were `dropped`, and of
all slots the `empty slots`. `balance loss [nat]` and `z loss [nat]` are what the router adds to
the loss of a token, times their factors: over model.balance_loss, the first is 1 where the load is
even.""",
    "exchanges": """\
What goes to the experts of other ranks, the dispatch, and what comes back, the combine; in a
backward pass gradients go the other way, those of the combine first. `received [B]` is the same
whatever the load, for empty slots are sent, too. `blocked [ms]` is `wait [ms]` and `transfer
[ms]`, as of all calls.""",
    "memory": """\
The highest peak of each kind of arrays in any step, the first one too, and a rank that has
it. The kind all is what a rank held at one time, which decides whether a run fits. The peaks
of different kinds need not be at one time, so it is at most their sum.""",
    "memory_ranks": """\
The highest peak of each kind on each rank; the last row sums over the ranks.""",
    "copies": """\
What is copied to where arrays are offloaded (`what` offload) and back (fetch), a rank and step.
`exposed [ms]` is how long the rank stands still for it: all of the time where it copies itself,
and what it waits where its device copies beside what it computes.""",
}
