"""Definitions of the columns of every table in a report.

Words in backticks are column headings. Each module in hpc3d.analyze.metrics documents how its
numbers are computed.
"""

GENERAL = """\
A training step has three parts: the forward pass computes the loss, the backward pass computes its
gradient with respect to every weight, and the optimizer updates the weights.

Times, calls and bytes are means over the ranks and steps of a run, unless a table has one row per
rank or step or its heading says median. Averages exclude the first recorded step, which is the
warmup, if there are other steps. The list at the top of each run states which steps are averaged.
Losses, the work between steps and the memory peaks cover all steps.

A dash marks an unknown value. Nested events are not counted twice: the time of a pass or call
excludes the events inside it. The files in tables/ contain the same numbers in seconds, bytes and
floating-point operations (FLOP), without prefixes."""

MEANING = {
    "attempts": """\
One row per attempt of a resumed run: the first start and each resumption. `from` and `to` are the
first and the last step that the attempt trained. The steps from `superseded from` on were trained
again by a later attempt. They count once: losses, evaluations and figures show the newer values.
`median step [ms]` and `tokens/s` exclude the first step of the attempt. All other tables except
the losses and evaluations refer to the newest trace, which includes the steps of earlier attempts
only if they had the same layout. The first attempt has no trace if the job was killed before it
wrote one.""",
    "runs": """\
`median [ms]` is the median step time of the slowest rank, with the quartiles `25 % [ms]` and `75 %
[ms]`. `steps` is the number of steps in these quantiles. `tokens/s` is the number of tokens per
step divided by this median. `communication` is the share of the step time spent in communication
calls (collectives and messages). `received [B]` is the number of bytes that a rank would receive
per step if every collective used a bandwidth-optimal algorithm. It is computed from the sizes of
the arrays.

`loss [nat]` is the loss after the last step that all runs have in common, `loss after step`. The
`validation loss [nat]` is that after the last step up to this step after which all runs were
evaluated, `evaluated after step`. The `best validation loss [nat]` is the lowest one up to that
step. Runs without evaluations are ignored. The `max loss difference [nat]` over all steps that a
run and its reference have in common shows whether two layouts train the same model, unless other
keys, which the verdict names, change the losses.
It is the difference from the run of the reference group (the first group, or a group that does the
same work) that has the same seed. It is undefined if no run has the same seed and model size.""",
    "seeds": """\
Runs with the same configuration except for the seed. `mean loss [nat]` is the mean over the
`seeds` of the loss after the last step that all runs have in common, `loss after step`, and `mean
validation loss [nat]` the mean of the loss of the last common evaluation, `evaluated after step`.
Each is followed by the half-width of its 95 % confidence interval (Student's t): 5.32 ± 0.12.""",
    "received": """\
Bytes that a rank receives per step along each mesh axis if every collective uses a
bandwidth-optimal algorithm. `difference` is relative to the first run. `time [ms]` is the time per
step that a rank spends in communication calls along the axis. In the CSV file, the columns are
numbered by run, starting from 1, as in bytes_2.""",
    "scaling": """\
`forward [ms]` and `backward [ms]` are the mean time of a rank in its forward and backward passes,
over all microbatches. The `average step time per sequence [ms]` is the median of their sum divided
by `batch`, the number of sequences per step. It is called average step time in arXiv:2105.14450.
It excludes the messages between pipeline stages, the gradient reduction over replicas and the
optimizer.
`tokens/s` and `tokens/s per rank` refer to complete steps.

`step [ms]` is the median step time of the slowest rank. Runs that differ only in the seed have one
row. Its times are arithmetic means over the seeds of the medians of the runs, and its tokens/s the
tokens per step divided by `step [ms]`.
`scaling` is strong if a run does the same work as its reference, and weak if each rank does as
much work as a rank of the reference (parameters of the blocks times tokens, within 10 %). It is
other in all other cases, such as different models, data types or optimizers. The reference is the
first run, or the run in the column `reference`, such as a run of the same model size. In strong
scaling, `speedup` is `step [ms]` of the reference divided by that of this run. In weak scaling, it
is the ratio of the FLOP/s. It is undefined for other runs. Its 95 % confidence interval is `from`
to `to` (ratio of the medians of at least 3 steps, which are assumed to be independent; fewer than
6 steps are also assumed to be log-normal; Welch's interval of the medians of the runs if both
groups have at least three; none if one has two). `efficiency` is the speedup divided by the ratio
of the rank counts. If all runs have the same number of ranks, the scaling and the efficiency are
omitted.""",
    "gains": """\
`tensor parallelism` is the number of dimensions in which the matrix products are sharded. `over
1-D` is the `average step time per sequence [ms]` of the best 1-D run divided by that of this run.
Both runs have the same model, batch, data type, optimizer, and number of ranks, stages and
replicas. Runs that differ only in the seed have one row, as in the table Speed and scaling. `over
2-D` is the same ratio for the best 2-D run. arXiv:2105.14450 reports 2.32 and 1.57 for 3-D on 64
ranks. `step over 1-D` and `step over 2-D` are the same ratios of `step [ms]`, the complete step of
the slowest rank, including the optimizer. `from` and `to` after a ratio are its 95 % confidence
interval, as for the speedup.""",
    "differences": """\
Time of a step in the first run and in this run, by category, phase, axis and operation. The 95 %
confidence interval of the `difference [ms]` ranges from `from [ms]` to `to [ms]` (Welch's
interval; steps are assumed to be independent).""",
    "step": """\
`min [ms]`, `25 % [ms]`, `median [ms]`, `75 % [ms]` and `max [ms]` are quantiles of the step time,
without the warmup: `steps` is the number of steps, `from` is the index of the first step, and `to`
that of the last one. The time of a step is the time of its slowest rank. `forward [ms]` and
`backward [ms]` are the mean time of a rank in these passes. They include the communication calls
inside a pass, but not the messages between stages, the gradient reduction over replicas and the
optimizer. `tokens/s` is the number of tokens per step divided by the median. `communication` is
the share of the step time spent in communication calls.""",
    "efficiency": """\
`model [FLOP]` is the number of floating-point operations that a step of this model requires, by
equation 7 of arXiv:2205.05198: 72 B L s h^2 (1 + s / (6 h) + V / (12 h L)) for B sequences of s
tokens, L layers of width h and a vocabulary of V. Other model families have an equivalent formula.
For a mixture of experts, it includes only the experts to which a token is routed. `recorded
[FLOP]` is the number of operations in the recorded matrix products and attention. It is larger
than the model FLOP with recomputation, a padded vocabulary or unused expert capacity. It is
smaller if tokens are dropped or if attention skips masked chunks, because `model [FLOP]` includes
the masked half of the attention matrix. `model [FLOP/s]` and `recorded [FLOP/s]` divide these
numbers by the median step time. `MFU` and `HFU` (model and hardware FLOPs utilization) are these
rates divided by the peak rate of all ranks, which is set with --peak.""",
    "prediction": """\
Values predicted by python -m hpc3d.simulate for this run on `machine`, and the measured values. If
`predicted / measured` is below 1, the run needed more time or memory than predicted. step_s is the
median step time of the slowest rank [s]. peak_KIND_bytes is the highest peak of one kind of memory
on a rank [B].""",
    "loss": """\
Mean loss per token after each step, the `gradient norm` before clipping, and the time of the
slowest rank. If the run was resumed, `attempt` is the attempt that trained the step, and
`superseded in attempt` lists earlier attempts that also trained it.""",
    "evaluation": """\
Evaluation of the model on held-out text: the mean loss of the evaluated `tokens`, the `perplexity`
exp(loss), and the `accuracy`, which is the share of tokens to which the model assigns the highest
probability. For a PyTorch module, the loss is the mean over samples, and `tokens` are samples. The
`time [ms]` of an evaluation is not part of a step. If there are several validation texts, the loss
and the accuracy are means over the texts.""",
    "validation": """\
Evaluation of the model on each of several validation texts. `text` is the name of the file; the
other columns are those of the table Evaluation.""",
    "time": """\
Breakdown of the mean step time, `time [ms]`. `category` is the activity of a rank: compute, comm
(waiting for the result of a communication call), copy (starting a call whose result the rank waits
for later, or copying an offloaded array), optimizer, or io (reading the text). unrecorded is the
part of the step without any event. `phase` is the part of the step, `axis` the mesh axis of a
communication call, and `operation` the computation or call. Bytes are counted only at the
receiver, as `received [B]`. `rate [FLOP/s]` is the rate of one rank.""",
    "between": """\
Work of the ranks between steps, which is not included in the step times. snapshot copies the
state, which a thread then writes in the background; checkpoint is the time that a rank waits until
a checkpoint is on disk. `count` and `total [ms]` are means over the ranks, `mean [ms]` is the mean
duration, and `longest [ms]` is the longest duration on any rank.""",
    "layers": """\
Time of a step by Transformer layer. The row without a layer number contains the embedding, head,
loss and optimizer.""",
    "ranks": """\
`step [ms]` is the sum of `compute [ms]` (including the optimizer), `wait [ms]`, `transfer [ms]`,
`copy [ms]`, `other [ms]` (such as reading data) and `unrecorded [ms]`. A rank is blocked in a
communication call for `wait [ms]` until the last member arrives, and then for `transfer [ms]`
until the call ends. The sum of these two times is `exposed [ms]`. `copy [ms]` is the time to start
calls whose results the rank waits for later, and to copy offloaded arrays.

`outstanding call [ms]` is the part of `compute [ms]` during which the rank had posted a
communication call without waiting for it yet. The call may have completed long before, so this is
an upper bound on the communication hidden by computation.""",
    "imbalance": """\
Mean compute time over all ranks, and compute time of the busiest rank. `max / mean` compares ranks
that do the same work: it is the compute time of a rank divided by the mean of the ranks with the
same pipeline stage and the same experts, for the rank `on rank` with the largest ratio. The stage
imbalance, `stages, max / mean`, is the mean compute time of a rank of stage `on stage` divided by
the mean over the stages. Both ratios are 1 if the load is balanced.""",
    "waits": """\
`blocked [ms]` is the time from when a rank starts to wait for a communication call until it has
the result. `wait [ms]` is the part of this time before the last member of the call arrives, and
`transfer [ms]` the part after. A broadcast waits only for its root. Violations are calls that
ended before a required member arrived. They show that the clocks of two hosts disagree by at least
`worst [us]`.""",
    "stragglers": """\
`arrives last` is the number of `calls` (collectives and messages) at which a rank arrived last.
The `peers` of a rank do the same work: they have the same pipeline stage and the same experts.
`imposed wait [ms]` is the time per step that the peers wait for the rank, summed over the peers. A
rank may be late because it waited for another rank; the critical path shows this. `busy [ms]` is
the median time per step during which the rank is not blocked in communication calls. A rank is a
`straggler` if both conditions hold: it has the longest busy time of its peers in significantly
more steps than expected by chance (5 % level), and its busy time exceeds the median of its peers
by at least 1 % of a step. A dash means that the rank has no peers, or that there are too few steps
to decide. Differences between stages are stage imbalance, not stragglers.""",
    "path": """\
Critical path of the step: the sequence of work across ranks that determined the step time. Wait
times are not part of the path. Only faster work on this path can shorten the step. The category
host is the time between two events.""",
    "collectives": """\
`median [us]` is the time from the arrival of the last member to the end of the call. `size [B]` is
the size of the complete array, `algbw [B/s]` the size divided by the time, and `busbw [B/s]` is
algbw times (n-1)/n for n members, or 2(n-1)/n for all-reduce: the bandwidth used on each member's
link (nccl-tests). `deferred wait` is the share of calls in which a rank did other work before it
waited for the result. The recorded end of such a call may be later than its actual end.""",
    "traffic": """\
Bytes sent per step from each rank to each other rank, regardless of the route chosen by the MPI
library. The root is the only sender of a broadcast and the only receiver of a reduction. In other
collectives, all members send equal shares.""",
    "crossing": """\
Totals per step over the ranks of a host: the number of communication calls with ranks on other
hosts, the bytes `received [B]` (if every collective uses a bandwidth-optimal algorithm), and the
part of these bytes that comes `from other hosts [B]`. `through NICs [B]` is the number of bytes
that the NIC of the host receives. If a group has the same number of ranks on each of its h hosts,
large blocks enter a host once and are then distributed inside it. An all-gather or reduce-scatter
thus receives (h-1)/h of the complete block, an all-reduce twice as much, and a broadcast or
reduction one block. For other groups, the number is an upper bound: it assumes that every rank
receives its data separately.""",
    "crossing_pairs": """\
Bytes sent per step from each host to each other host, summed over their ranks. The diagonal is the
traffic within a host.""",
    "pipeline": """\
`F [ms]` is the time that a stage spends in forward passes, and `BW [ms]` the time in full backward
passes. If the schedule splits the backward pass, `B [ms]` is the time for the input gradient, and
`W [ms]` the time for the weight gradients. `idle` is the share of the time between the first and
the last pass of all stages in which this stage runs no pass. `idle, ideal` is the same share
for the ideal schedule, with instantaneous messages and identical stages. `in flight` is the
maximum number of microbatches whose forward pass has started and whose backward pass has not
ended.""",
    "pipeline_bubble": """\
The `pipeline bubble` is the share of the time from the first to the last pass of a stage that is
not work: (cost - work) / cost (arXiv:2401.10241). The cost is the longest such time of any stage,
and the work the longest such time without waits for messages. The commands simulate and plan print
the same quantity. The `ideal bubble` is the bubble of the schedule with instantaneous messages and
identical stages. The `idle time` is the share of the time from the first to the last pass of all
stages in which a stage runs no pass, averaged over the stages. It is larger than the pipeline
bubble, because it includes the time before the first and after the last pass of each stage, and
the shorter work of fast stages.""",
    "bubble": """\
Idle time of a stage, including waits for messages, in three parts: `warmup [ms]` before its first
backward pass, `drain [ms]` after its last forward pass, and `steady [ms]` in between. `all passes
[ms]` is the time from the first to the last pass of all stages.""",
    "expert_cost": """\
`capacity` is the number of token slots of each expert per step. `max / mean` is the load of the
busiest expert divided by the mean load of all experts, averaged over steps and layers. An expert
computes all of its slots, used or not, so a higher load does not slow down its matrix products.
Load imbalance instead has two costs: tokens beyond the capacity are `dropped`, and other experts
have `unused capacity`. `dropped, balanced` and `unused, balanced` are the shares that would remain
with a balanced load. `unused [FLOP]` is the number of operations per step on unused slots in
forward and backward passes. `wait along e [ms]` is the mean wait of a rank in dispatch and
combine, and `share of step` its share of the step time. The rank in the column `for rank` causes
the longest waits; it owns `experts` in every layer. `load` is the number of tokens in the slots of
these experts relative to the mean over all experts. If it is close to 1, the load is not the
reason for the wait.""",
    "experts": """\
Totals over the averaged steps: the `share of tokens` routed to an expert, and its `load`, which is
this share times the number of experts (1 with a balanced load). `dropped` is the share of its
tokens that exceeded the capacity, and `unused capacity` the share of its slots that are empty.""",
    "routers": """\
Expert load of each layer in each step: the highest load, `max / mean`, of the `busiest expert`,
and the lowest load, `min / mean`. `dropped` is the dropped share of all routed tokens, and `unused
capacity` the unused share of all slots. `balance loss [nat]` and `z loss [nat]` are the auxiliary
losses per token, including their factors. The balance loss divided by model.balance_loss is 1 if
the load is balanced.""",
    "exchanges": """\
Dispatch sends tokens to the experts of other ranks, and combine returns the results. The backward
pass sends gradients in the opposite direction and starts with the combine. `received [B]` does not
depend on the load, because unused slots are also sent. `blocked [ms]` is the sum of `wait [ms]`
and `transfer [ms]`, as for all calls.""",
    "memory": """\
Highest peak of each kind of memory over all steps, including the first one, and the rank on which
it occurred. The kind "all" is the total memory of a rank; its peak decides whether a run fits. The
peaks of different kinds may occur at different times, so their sum is an upper bound. The kind
"communication" consists of gathered blocks, messages and results of matrix products, which a
collective may reduce. Runs on a single rank also count these results as "communication".""",
    "memory_ranks": """\
Peak of each kind of memory on each rank. The last row is the sum over the ranks.""",
    "copies": """\
Offload copies per rank and step. The `direction` is "offload" for a copy to the offload memory,
and "fetch" for a copy back. `exposed [ms]` is the time during which the rank is blocked: the full
copy time if the CPU copies, or the wait time if the device copies while it computes.""",
}
