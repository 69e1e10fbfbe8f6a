"""Mixtures of experts: serial against torch, on meshes against serial, in float64."""

import pytest

from hpc3d.model.families import LLAMA
from hpc3d.model.spec import Experts, ModelSizes
from tests.model import mixture_reference
from tests.model.test_stage import SHAPE, same_as

TOP_1 = Experts(6, balance_loss=0.3, z_loss=0.2)
TOP_2 = Experts(6, top_k=2, capacity=1.0, every=2, shared=1, balance_loss=0.3, z_loss=0.2)
ROOM = Experts(4, top_k=3, capacity=0, balance_loss=0.3)


def sizes(experts, **how):
    return ModelSizes(**SHAPE | how, experts=experts, std=0.3)


@pytest.mark.parametrize("experts", [TOP_1, TOP_2, ROOM])
def test_gpt_2_with_experts_is_that_of_torch(experts):
    same_as(mixture_reference.loss, sizes(experts))


@pytest.mark.parametrize("experts", [TOP_1, TOP_2, ROOM])
def test_llama_with_experts_is_that_of_torch(experts):
    same_as(mixture_reference.loss, sizes(experts, kv_heads=2, ffn=40, tied=False), LLAMA)
