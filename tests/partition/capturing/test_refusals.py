"""What cannot be traced is explained in one line, with a place in the user's code and a remedy."""

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

from hpc3d.partition.capture import capture
from tests.partition.user_models import Base, rows


class Reads(Base):
    """A number that is read from a tensor."""

    def forward(self, x):
        return self.loss(x) * x.sum().item()


class Decides(Base):
    def forward(self, x):
        return self.loss(x if x.sum().item() > 0 else -x)


class Reentrant(Base):
    def forward(self, x):
        return self.b(checkpoint(self.a, x, use_reentrant=True)).mean()


class Hidden(Base):
    """A layer that is no submodule."""

    def __init__(self):
        super().__init__()
        self.others = [torch.nn.Linear(6, 6)]

    def forward(self, x):
        return self.loss(self.others[0](x))


class Fixed(Base):
    def forward(self, x):
        return self.loss(x + torch.ones(8, 6))


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Reads, r"a Python number depends .*: mul \(.*\.py:\d+\); move this code into a submod"),
        (Decides, r"depends on tensor values \(.*\.py:\d+\); move this code into a submodule$"),
        (Reentrant, r"pass use_reentrant=False to torch.utils.checkpoint.* \(.*\.py:\d+\)$"),
        (Hidden, r"not stored in the module; register it as .* \(.*\.py:\d+\)$"),
        (Fixed, r"a fixed batch size, .*; compute sizes from the shapes of .* \(.*\.py:\d+\)$"),
    ],
)
def test_refusal_names_a_line_and_a_remedy(kind, line):
    with pytest.raises(ValueError, match=f"^this model cannot be captured: .*{line}") as found:
        capture(kind(), (rows().float(),))
    assert len(str(found.value).splitlines()) == 1 and "test_refusals.py" in str(found.value)


def test_checkpointing_without_reentry_is_traced():
    class Traced(Base):
        def forward(self, x):
            return self.b(checkpoint(self.a, x, use_reentrant=False)).mean()

    captured = capture(Traced(), (rows().float(),))
    assert all(each.requires_grad for each in captured.program.state_dict.values())
