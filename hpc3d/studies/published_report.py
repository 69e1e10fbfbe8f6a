"""Report that compares predicted with published step times on H100, A100 and V100 GPUs.

`python -m hpc3d.studies.published_report > docs/published-steps.md` writes the page of the
documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.config.load import literal
from hpc3d.config.package_data import default_machine, shipped
from hpc3d.predict.machine.machine import LEAST_FOR_PERCENTILES
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies import megatron, megatron_report, tensor_3d, vtrain
from hpc3d.studies.hopper_steps import by_kind, by_layout, predicted, published

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Errors, Machine

_FAR = 0.35  # absolute error from which on the page names the cause
_VTRAIN = "machines/a100-vtrain.toml", "published/vtrain-multi.csv.gz"
_PAPERS = "arXiv:2205.05198", "arXiv:2104.04473"  # on Megatron-LM
_V100_SIZES = (6144, 128), (8192, 128)  # hidden size and batch
_RATIOS = {"1d": "3-D over 1-D", "2d-summa": "3-D over 2-D"}

_HEAD = """\
# Published steps

This page compares the step times that `simulate` predicts with all published step times that
hpc3d uses, on H100, A100 and V100 GPUs. `python -m hpc3d.studies.published_report >
docs/published-steps.md` writes the page, and `python -m hpc3d.bench published` prints the same
tables. [prediction.md](prediction.md) explains the predictions.

The errors of *used* rows were examined to find properties that the model lacked, such as the
protocols of NCCL. The other rows are *held out*. Errors are relative to the published time. A
negative error means that the prediction is too fast.

## Machine files

| machine file | numbers from | fitted to step times |
|---|---|---|
| `h100` | data sheets, nccl-tests, NCCL's tuning model, GEMM tables, arXiv:2407.08608 | nothing |
| `a100-selene` | data sheets, nccl-tests, GEMM tables, arXiv:2307.08691 | nothing |
| `a100-vtrain` | data sheets, nccl-tests, GEMM tables | two numbers, to single-node steps |
| `v100-4x16` | data sheets, nccl-tests, GEMM tables, an assumed node | nothing |

Each file in `inputs/machines` names the source of each of its numbers. The two fitted numbers are
the launch time of a kernel and the bandwidth of attention; they are fitted to a tenth of vTrain's
single-node steps, none of which is listed on this page.
"""

_H100 = """\
`inputs/published/h100-steps.json` contains the step times, their sources and the layouts, and the
assumptions where a source does not describe the layout. A hash of the row's name determines
whether a row is used or held out.

The predictions reproduce these properties of the published runs:

- Rows with context parallelism (c > 1) use ring attention with a fused kernel for each hop
  ([context-parallelism.md](context-parallelism.md#ring-attention)). The published programs also
  use fused kernels, or gather the keys and values.
- Rows of Megatron-Core and NeMo set `parallel.bucket_mb` to the default of Megatron-Core
  (megatron/core/distributed/distributed_data_parallel.py). A bucket has the float32 gradients of
  40 million parameters, or of 1 million parameters per replica if this is more.
- Rows with ZeRO 3 set `parallel.prefetch`, because the published programs prefetch weights. While
  a gather or another collective runs, kernels take longer
  ([prediction.md](prediction.md#contention)).
- The memory bandwidth of torchtitan's GPUs is 2.4 TB/s. The network bandwidth is one half of that
  of a DGX H100 for MaxText on A3, and one quarter for fms-fsdp.
- torchtitan, fms-fsdp and nanotron compute attention with FlashAttention-2, which is slower than
  cuDNN's attention.
- llm-foundry computes attention with FlashAttention in Triton, the default of its benchmark script
  (`attn_impl` in scripts/train/benchmarking/submit_benchmarks.py). At the time of these runs,
  FlashAttention-2 did not support ALiBi (mosaicml/llm-foundry issue 638). FlashAttention-2 is 1.3
  to 1.5 times as fast in the forward pass, and twice as fast in the backward pass
  (arXiv:2307.08691, section 4.1); the predictions assume 1.4 and 2.

These properties are not modeled:

- overlap of tensor collectives: they are exposed, because the rows use the default of
  `parallel.chunked_products`. Some published programs split a product and its collective into
  chunks;
- the power limit of torchtitan's GPUs (500 W instead of 700 W);
- kernel launches by the host, which delay eager programs such as llm-foundry: the sources do not
  state the time per launch (`host_s` of a machine file);
- the network of nanotron's runs, which the source does not describe;
- memory-saving options that the sources do not mention. Some rows therefore do not fit in
  memory, although the published runs did. For each of these rows, `plan --memory 80GB` finds a
  layout that fits.
"""

_A100 = """\
The first rows are steps of Megatron-LM from table 5 of
[arXiv:2205.05198](https://arxiv.org/abs/2205.05198) (used) and table 1 of
[arXiv:2104.04473](https://arxiv.org/abs/2104.04473) (held out). The other rows are the 109
multi-node steps of vTrain, measured with Megatron-DeepSpeed
([inputs/published](../inputs/published/README.md)). Their names list the hidden size, the
layers, the sequences per step and per microbatch, and the numbers of tensor-parallel,
data-parallel and pipeline-parallel ranks.
"""

_V100 = """\
[arXiv:2105.14450](https://arxiv.org/abs/2105.14450) reports speedups of 3-D over 1-D and 2-D
tensor parallelism on 64 GPUs, but states neither the model size nor the type of node. The rows use
a batch of 128 sequences and the hidden sizes for which both predictions agree with the paper. They
therefore show only that the published speedups are plausible, and do not validate the predictions.
`bench speedups` prints the predictions for all sizes.
"""

# Causes of errors beyond _FAR, by the beginning of the row's name.
_CAUSES = {
    "nanotron-80b": "The source does not describe the network between the nodes. Both rows "
    "depend on it: on 512 GPUs, tensor-parallel groups of 16 GPUs span two nodes; on 64 GPUs, the "
    "pipeline has 16 stages.",
    "nanotron": "The published steps take less than 0.4 s. The errors are therefore probably "
    "due mainly to kernel launches by the host, whose time the source does not state, and to the "
    "unknown network.",
    "vtrain-3072": "The published time is twice that of the same step with 32 instead of 64 "
    "sequences per microbatch, which does the same work. The source does not explain it.",
    "vtrain-8192": "The published steps with two tensor-parallel ranks take 19 to 27 s, and the "
    "steps with four or eight ranks and equal microbatches 15 to 18 s. The source does not "
    "explain the difference.",
}


class _PublishedTable(NamedTuple):
    """Rows of a table; `unit` is that of the published and predicted values."""

    title: str
    text: str
    rows: Iterable[dict[str, Any]]
    unit: str = " [s]"


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the predictions of all published steps.

    `options.machine` replaces the machines of all rows.
    """
    found = megatron_report.main(options)
    steps = [found[name]["rows"] for name in ("recomputation", "weak scaling")]
    rows: dict[str, list] = {}
    for line in _tables(options.machine, steps, rows):
        print(line, flush=True)
    return found | {
        title.lower(): {"rows": each, "errors": by_kind(each)} for title, each in rows.items()
    }


def _tables(
    name: str | None, steps: Iterable[Iterable[Mapping[str, Any]]], found: dict[str, list]
) -> Iterator[str]:
    """Predict all rows, store them in `found` by section, and yield the lines of the tables.

    `name` is the machine of all rows (default: the machine of each section). `steps` lists the
    predicted steps of each paper on Megatron-LM.
    """
    files = default_machine(), *map(shipped, (_VTRAIN[0], tensor_3d.V100))
    hopper, a100, v100 = (load(name or file) for file in files)
    for section in (
        _PublishedTable("H100", _H100, (predicted(row, hopper) for row in published())),
        _PublishedTable("A100", _A100, chain(_of_megatron(steps), _of_vtrain(a100))),
        _PublishedTable("V100", _V100, _speedups(v100), ""),
    ):
        yield from _table(section, found.setdefault(section.title, []))
    yield f"\n## Errors beyond {100 * _FAR:.0f} %\n"
    yield from _causes(chain.from_iterable(found.values()))
    yield "\n## Intervals\n"
    yield "For each kind of layout, `h100.toml` contains two percentiles of the ratio of"
    yield "published to predicted step time: the 10th (`low`) and the 90th (`high`). For fewer"
    least = LEAST_FOR_PERCENTILES
    yield f"than {least} steps, they are the minimum and the maximum instead. The rows"
    yield "of nanotron are excluded. `simulate` and `plan` multiply a predicted step time by"
    yield "both ratios, and print the resulting interval:"
    for each in by_layout(found["H100"]):
        yield from ("", "    [[errors]]", *(f"    {line}" for line in _toml(each)))


def _of_megatron(tables: Iterable[Iterable[Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each predicted step of `megatron.rows`, one table per paper."""
    for paper, steps in zip(_PAPERS, tables, strict=True):
        for step in steps:
            yield {
                "id": f"megatron-{step['model']}-{step['recompute']}-{step['ranks']}",
                "kind": f"Megatron-LM, {paper}",
                "held_out": paper != _PAPERS[0],
                "ranks": step["ranks"],
                "seconds": step["published_s"],
                "predicted_s": step["predicted_s"],
                "error": step["error"],
            }


def _of_vtrain(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a row for each multi-node step of vTrain.

    No dimension of these steps is odd, so the slowdown of odd products has no effect.
    """
    steps = vtrain.read(shipped(_VTRAIN[1]))
    seconds = vtrain.Steps(steps, vtrain.MEASURED).seconds(vtrain.ProfileFactors(machine, 1.0, {}))
    names = "hidden", "layers", "batch", "micro", "t", "d", "p"
    for step, predicted_s in zip(steps, seconds.tolist(), strict=True):
        sizes = "-".join(str(step[name]) for name in names)
        published_s = float(step["ms"]) / 1e3
        yield {
            "id": f"vtrain-{sizes}",
            "kind": "vTrain, multi-node",
            "held_out": True,
            "ranks": int(step["ranks"]),
            "seconds": published_s,
            "predicted_s": predicted_s,
            "error": predicted_s / published_s - 1,
        }


def _speedups(machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield a row for each published speedup of 3-D tensor parallelism and each hidden size."""
    for hidden, batch in _V100_SIZES:
        found = tensor_3d.point(machine, batch, hidden, "float32")["speedup"]
        for scheme, speedup in tensor_3d.PAPER.items():
            yield {
                "id": f"{_RATIOS[scheme]}, hidden size {hidden}",
                "kind": "speedups, arXiv:2105.14450",
                "held_out": False,
                "ranks": tensor_3d.RANKS,
                "seconds": speedup,
                "predicted_s": found[scheme],
                "error": found[scheme] / speedup - 1,
            }


def _table(section: _PublishedTable, found: list[dict[str, Any]]) -> Iterator[str]:
    """Append the rows of a section to `found`, and yield the lines of its tables."""
    more = section.title == "H100"
    yield f"\n## {section.title}\n"
    yield section.text
    names = [f"{name}{section.unit}" for name in ("published", "predicted")]
    columns = ["GPUs", *names, "error", *(("MFU", "memory [GB]") if more else ())]
    yield f"| row | | {' | '.join(columns)} |"
    yield "|---|---|" + len(columns) * "---:|"
    for row in section.rows:
        found.append(row)
        yield _line(row, more)
    yield "\n| rows | number | mean absolute | median absolute | mean signed | worst |"
    yield "|---|---:|---:|---:|---:|---:|"
    errors = by_kind(found)
    for kind, each in errors.items():
        if kind != "all but nanotron" or each != errors["all"]:
            yield _statistics(kind, each)


def _line(row: Mapping[str, Any], more: bool) -> str:
    use = "held out" if row["held_out"] else "used"
    if "refused" in row:
        return f"| {row['id']} | {use} | | {row['seconds']:.3g} | not supported | | | |"
    line = (
        f"| {row['id']} | {use} | {row['ranks']} | {row['seconds']:.3g} | "
        f"{row['predicted_s']:.3g} | {row['error']:+.1%} |"
    )
    if not more:
        return line
    memory = f"{row['memory_GB']:.0f}" + ("" if row["fits"] else " (does not fit)")
    return f"{line} {row['mfu']:.2f} | {memory} |"


def _statistics(kind: str, each: Mapping[str, Any]) -> str:
    sizes = " | ".join(f"{each[name]:.1%}" for name in ("mean", "median"))
    return f"| {kind} | {each['rows']} | {sizes} | {each['signed']:+.1%} | {each['worst']:+.1%} |"


def _causes(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each cause of errors beyond _FAR, with the rows that it explains."""
    far: dict[str, list[str]] = {}
    for row in rows:
        if abs(row.get("error", 0)) > _FAR:
            cause = (text for name, text in _CAUSES.items() if row["id"].startswith(name))
            named = f"{row['id']} ({row['error']:+.0%})"
            far.setdefault(next(cause, "The cause is not known."), []).append(named)
    yield from (f"- {', '.join(names)}: {cause}" for cause, names in far.items())


def _toml(errors: Errors) -> Iterator[str]:
    yield from (f"{key} = {literal(value)}" for key, value in asdict(errors).items())


def _page() -> Iterator[str]:
    machine = load(shipped(megatron.SELENE))
    listed = megatron.RECOMPUTATION, map(megatron.weak, megatron.WEAK_SCALING)
    yield _HEAD.rstrip()
    yield from _tables(None, [megatron.rows(each, machine) for each in listed], {})


if __name__ == "__main__":
    for text in _page():
        print(text, flush=True)
