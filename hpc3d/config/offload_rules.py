"""The rules of what is offloaded: what goes together with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpc3d.pipeline.schedule import find

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config

_STATELESS = ("sgd", "adafactor")


def wrong_offload(config: Config) -> Iterator[str]:
    """Where there is nothing to offload, or nobody fetches it."""
    train, listed = config.train, config.parallel.offload
    key = f"parallel.offload = {[*listed]}"
    if len({*listed}) < len(listed):
        yield f"{key}: names something twice; name each once"
    if "optimizer" in listed and train.optimizer in _STATELESS:
        yield (
            f"{key}: train.optimizer = {train.optimizer} keeps next to nothing; leave "
            '"optimizer" out, or use another one'
        )
    schedule = find(config.parallel.schedule)
    if "parameters" in listed and schedule.asynchronous:
        yield (
            f"{key}: under schedule {schedule.name} passes in flight have weights of their own; "
            'leave "parameters" out, or use a schedule that is synchronous'
        )
    if train.cuda_graph and {*listed} - {"optimizer"}:
        yield (
            f"{key}: no CUDA graph records copies to the host; use train.cuda_graph = false, or "
            '["optimizer"]'
        )
