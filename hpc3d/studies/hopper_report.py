"""Text report that compares predicted with published step times on H100 GPUs.

`python -m hpc3d.studies.hopper_report > docs/h100-steps.md` writes the page of the documentation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpc3d.config.load import literal
from hpc3d.config.package_data import default_machine
from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.hopper_steps import by_kind, by_layout, predicted, published

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.predict.machine.machine import Errors, Machine

_HEAD = """\
# Published steps on H100

This page compares the step times that `simulate` predicts with published step times on H100 GPUs.
`python -m hpc3d.studies.hopper_report > docs/h100-steps.md` writes the page, and
`python -m hpc3d.bench published` prints the same tables.

`inputs/published/h100-steps.json` contains the step times, their sources and the layouts, and the
assumptions where a source does not describe the layout. `inputs/machines/h100.toml` names the
source of each number of the machine model; no number is fitted to a step time. A hash of
the row's name assigns each row to one of two groups. The errors of *used* rows were examined to
find properties that the model lacked, such as the protocols of NCCL. The other rows are *held
out*. Errors are relative to the published time. A negative error means that the prediction is too
fast.

## Differences from the published programs

The predictions are for hpc3d, which differs from the published programs in the following ways:

- **Overlap**: tensor collectives and the gathers of ZeRO 3 are exposed, because the rows use the
  defaults of `parallel.prefetch` and `parallel.chunked_products`. The published programs prefetch
  weights, or split a product and its collective into chunks. The difference is largest for
  fms-fsdp, which shards a small model over 96 GPUs on a slow network.
- **Memory**: with ZeRO, hpc3d copies gradients into buckets, which doubles the gradient memory
  until the gradients are reduced. Some rows therefore do not fit in memory, although the published
  runs did.

The predictions account for four properties of the published runs:

- Rows with context parallelism (c > 1) use ring attention with a fused kernel for each hop
  ([context-parallelism.md](context-parallelism.md#ring-attention)). The published programs also
  use fused kernels, or gather the keys and values.
- Rows of Megatron-Core and NeMo set `parallel.bucket_mb` to the default of Megatron-Core: 40
  million parameters, or 1 million per replica if this is more
  (megatron/core/distributed/distributed_data_parallel.py), in float32.
- The memory bandwidth of torchtitan's GPUs is 2.4 TB/s. The network bandwidth is one half of that
  of a DGX H100 for MaxText on A3, and one quarter for fms-fsdp.
- torchtitan, llm-foundry, fms-fsdp and nanotron compute attention with FlashAttention-2, which
  is slower than cuDNN's attention. This is an assumption for llm-foundry, which also supported
  FlashAttention-1.

Three properties are not modeled:

- the power limit of torchtitan's GPUs (500 W instead of 700 W);
- kernel launches by the host, which delay eager programs such as llm-foundry;
- the network of nanotron's runs, which the source does not describe.
"""


def main(options: Namespace) -> dict[str, Any]:
    """Print and return the predictions for a machine (default: h100)."""
    machine = load(options.machine or default_machine())
    found = []
    for line in _report(published(), machine, found):
        print(line, flush=True)
    return {"rows": found, "errors": by_kind(found)}


def _report(
    rows: Iterable[Mapping[str, Any]], machine: Machine, found: list[dict[str, Any]]
) -> Iterator[str]:
    """Predict the rows, append the predictions to `found`, and yield the lines of the report."""
    yield "\n## Rows\n"
    yield "| row | | GPUs | published [s] | predicted [s] | error | MFU | memory [GB] |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|"
    for row in rows:
        found.append(predicted(row, machine))
        yield _line(found[-1])
    yield "\n## Errors\n"
    yield "| rows | number | mean absolute | median absolute | mean signed | worst |"
    yield "|---|---:|---:|---:|---:|---:|"
    yield from (_statistics(kind, each) for kind, each in by_kind(found).items())
    yield "\n## Intervals\n"
    yield "For each kind of layout, the machine file contains the 10th and the 90th percentile of"
    yield "the ratio of published to predicted step time. The rows of nanotron are excluded."
    yield "`simulate` and `plan` multiply a predicted step time by these ratios:"
    for each in by_layout(found):
        yield from ("", "    [[errors]]", *(f"    {line}" for line in _toml(each)))


def _toml(errors: Errors) -> Iterator[str]:
    yield from (f"{key} = {literal(value)}" for key, value in asdict(errors).items())


def _line(row: Mapping[str, Any]) -> str:
    use = "held out" if row["held_out"] else "used"
    if "refused" in row:
        return f"| {row['id']} | {use} | | {row['seconds']:.3g} | not supported | | | |"
    memory = f"{row['memory_GB']:.0f}" + ("" if row["fits"] else " (does not fit)")
    return (
        f"| {row['id']} | {use} | {row['ranks']} | {row['seconds']:.3g} | "
        f"{row['predicted_s']:.3g} | {row['error']:+.1%} | {row['mfu']:.2f} | {memory} |"
    )


def _statistics(kind: str, each: Mapping[str, Any]) -> str:
    sizes = " | ".join(f"{each[name]:.1%}" for name in ("mean", "median"))
    return f"| {kind} | {each['rows']} | {sizes} | {each['signed']:+.1%} | {each['worst']:+.1%} |"


def _page(rows: Sequence[Mapping[str, Any]], machine: Machine) -> Iterator[str]:
    yield _HEAD.rstrip()
    yield from _report(rows, machine, [])


if __name__ == "__main__":
    for text in _page(published(), load(default_machine())):
        print(text, flush=True)
