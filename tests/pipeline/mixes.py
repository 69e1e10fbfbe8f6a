"""Mixes of mesh, scheme, schedule and ZeRO, which must all train the same model equally.

A mix is a line of words `key=value`, where `key` is the last word of a key of the input file. The
trainer runs three steps of it in float64, with warm-up, clipping and AdamW.
"""

import shlex
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpc3d.comm.threads import run
from hpc3d.config.load import known_keys, load
from hpc3d.config.resolve import resolve
from hpc3d.data import token_file
from hpc3d.data.mixture import mixed
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.training import masking
from hpc3d.training.trainer import Trainer

# Every schedule with every stage of ZeRO, every scheme, on 1 to 16 ranks.
MIXES = """
p=1 schedule=none microbatches=12
p=2 schedule=gpipe microbatches=4 overlap=false
p=4 schedule=gpipe microbatches=6 dropout=0.25
p=2 schedule=1f1b microbatches=1
p=4 schedule=1f1b microbatches=2 tied=false gelu=exact
p=4 schedule=1f1b microbatches=12 layers_per_stage=[0,3,0,1] recompute=[1,3]
p=2 schedule=interleaved chunks=2 microbatches=4 clip=0
p=2 schedule=interleaved chunks=4 microbatches=4 layers=8 overlap=false
p=4 schedule=interleaved chunks=2 microbatches=6 layers=8 dropout=0.25
p=4 schedule=zb-h1 microbatches=8 optimizer=sgd learning_rate=0.1
p=4 schedule=zb-h2 microbatches=16 layers_per_stage=[1,1,2,0]
p=1 schedule=zb-v chunks=2 microbatches=3
p=2 schedule=zb-v chunks=2 microbatches=2 tied=false gelu=exact
p=4 schedule=zb-v chunks=2 microbatches=8 layers=8
p=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 layers_per_stage=[1,2,1,0]
d=2 schedule=none microbatches=1 zero=0 bucket_mb=0
d=2 schedule=none microbatches=6 zero=1 overlap=false
d=4 schedule=none microbatches=3 zero=2 bucket_mb=0.01
d=4 schedule=none microbatches=2 zero=1 layers=8 bucket_mb=0
d=2 x=2 y=2 schedule=none zero=3 scheme=2d prefetch=true chunked_products=2 hidden=36
p=2 d=2 schedule=gpipe microbatches=4 zero=0 bucket_mb=0
p=2 d=4 schedule=gpipe microbatches=3 zero=1 bucket_mb=0.02
p=2 d=2 schedule=gpipe microbatches=4 zero=2 tied=false gelu=exact
p=2 d=2 x=2 schedule=gpipe microbatches=4 zero=3 scheme=1d-sequence prefetch=true
p=2 d=2 schedule=1f1b microbatches=8 zero=0 overlap=false
p=4 d=2 schedule=1f1b microbatches=4 zero=1 layers_per_stage=[2,0,1,1]
p=2 d=3 x=2 schedule=1f1b microbatches=4 zero=2 dropout=0.25
p=2 d=2 x=2 z=2 schedule=1f1b microbatches=3 zero=3 keep_gathered=false prefetch=true
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=3 zero=0 scheme=1d
p=3 d=2 schedule=interleaved chunks=2 microbatches=4 zero=1 layers=8 overlap=false
p=2 d=2 schedule=interleaved chunks=2 microbatches=4 zero=2 bucket_mb=0
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=4 zero=3 layers=8
p=2 d=2 x=2 y=2 schedule=zb-h1 microbatches=3 zero=0 scheme=2d-summa
p=4 d=2 x=2 schedule=zb-h1 microbatches=4 zero=1 tied=false gelu=exact
p=4 d=2 schedule=zb-h1 microbatches=6 zero=2 bucket_mb=0.01
p=2 d=2 schedule=zb-h1 microbatches=4 zero=3 overlap=false recompute='["mlp_act"]'
p=4 d=2 schedule=zb-h2 microbatches=8 zero=0 bucket_mb=0.01
p=2 d=2 x=2 z=2 schedule=zb-h2 microbatches=3 zero=1 scheme=2.5d
p=2 d=2 y=2 z=2 schedule=zb-h2 microbatches=3 zero=2 keep_gathered=false
p=4 d=2 schedule=zb-h2 microbatches=4 zero=3 dropout=0.25 prefetch=true
p=2 d=2 schedule=zb-v chunks=2 microbatches=4 zero=0 clip=0
p=4 d=2 schedule=zb-v chunks=2 microbatches=8 zero=1 layers=8
p=2 d=2 x=2 schedule=zb-v chunks=2 microbatches=3 zero=2 overlap=false prefetch=true
p=2 d=3 x=2 schedule=zb-v chunks=2 microbatches=4 zero=3 layers_per_stage=[0,1,2,1]
p=4 d=2 schedule=v-half microbatches=6 zero=0 layers=8
p=2 d=2 schedule=v-min microbatches=4 zero=0 bucket_mb=0
p=3 d=2 schedule=v-min microbatches=4 zero=2 layers=8 overlap=false
p=4 d=2 schedule=dualpipe-v microbatches=12 zero=0 layers=8
p=2 d=2 schedule=dualpipe-v microbatches=6 zero=2 layers_per_stage=[0,1,2,1]
p=2 d=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 zero=0
p=2 d=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 zero=1 bucket_mb=0
p=2 d=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 zero=2 dropout=0.25
p=2 d=2 schedule=csv:{here}/by_hand.csv chunks=2 microbatches=4 zero=3 tied=false gelu=exact
p=2 x=2 y=2 z=2 schedule=1f1b microbatches=3 scheme=3d-broadcast
p=2 d=2 x=2 y=2 schedule=zb-h1 microbatches=2 zero=1 scheme=3d-broadcast
p=2 x=2 y=2 z=2 schedule=zb-v chunks=2 microbatches=3 scheme=3d
p=2 x=2 y=3 schedule=1f1b microbatches=4 scheme=2d recompute='["layernorm","mlp"]'
p=3 d=2 z=2 schedule=gpipe microbatches=4 zero=3 hidden=30 heads=6
p=2 d=2 x=4 schedule=interleaved chunks=2 microbatches=3 zero=2 scheme=1d chunked_products=3
p=2 d=2 x=2 z=2 schedule=interleaved chunks=2 microbatches=3 zero=3 scheme=2.5d
p=2 d=2 x=2 y=2 schedule=v-half microbatches=3 zero=3 scheme=2d-summa hidden=30 heads=6
p=2 d=2 x=2 schedule=1f1b microbatches=4 zero=1 order="x d p y z c e"
d=2 x=4 schedule=none batch=4 sequence=8 microbatches=2 scheme=1d-sequence zero=1
p=2 x=4 batch=6 sequence=4 schedule=zb-h1 microbatches=2 scheme=1d-sequence dropout=0.25
x=2 y=2 z=2 schedule=none batch=4 microbatches=1 scheme=3d chunked_products=2
p=2 x=2 z=2 schedule=1f1b microbatches=3 kind=llama kv_heads=4 ffn=48 tied=false
p=2 d=2 y=2 schedule=dualpipe-v microbatches=6 zero=3 kind=llama kv_heads=6 ffn=36 prefetch=true
d=2 x=2 y=2 schedule=none microbatches=2 zero=1 scheme=2d-summa kind=llama ffn=60 dropout=0.25
x=4 schedule=none batch=4 sequence=8 microbatches=2 scheme=1d-sequence kind=llama kv_heads=4
d=2 x=2 z=2 schedule=none microbatches=2 zero=2 kind=qwen2 kv_heads=4 ffn=48 prefetch=true
schedule=none microbatches=4 attention=chunked dropout=0.25
d=2 schedule=none microbatches=2 zero=1 attention=chunked kind=llama kv_heads=4 ffn=48
c=2 schedule=none microbatches=2 sequence=4 recompute=selective
p=2 c=2 x=2 z=2 schedule=1f1b microbatches=3 sequence=8 kind=llama kv_heads=4 ffn=48 tied=false
p=2 d=2 c=2 schedule=v-half chunks=2 microbatches=4 zero=1 sequence=4 bucket_mb=0.01
d=2 c=2 y=2 schedule=none microbatches=2 zero=3 sequence=4 context=all-to-all kind=llama kv_heads=2
d=2 c=2 schedule=zb-v chunks=2 microbatches=2 zero=2 sequence=4 recompute=full prefetch=true
c=3 x=2 schedule=none batch=12 microbatches=2 sequence=6 scheme=1d-sequence dropout=0.25
c=4 x=2 schedule=none microbatches=2 zero=3 sequence=8 context=both ulysses=2 dropout=0.5 hidden=36
c=2 x=2 y=2 schedule=none microbatches=2 sequence=4 scheme=2d-summa context=all-to-all dropout=0.25
c=2 x=2 y=2 z=2 schedule=none zero=3 sequence=4 scheme=3d-broadcast hidden=30 heads=6
p=2 c=4 y=2 schedule=interleaved chunks=2 microbatches=4 sequence=8 context=both ulysses=2
y=4 schedule=none microbatches=3 kind=llama kv_heads=2 ffn=48 recompute='["layernorm","mlp"]'
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d kind=llama kv_heads=1 ffn=48 tied=false
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=qwen2 kv_heads=1 keep_gathered=false
p=2 d=2 x=2 y=2 schedule=1f1b microbatches=3 zero=1 kind=qwen2 kv_heads=1 scheme=2d-summa
d=2 y=4 z=2 schedule=none microbatches=2 zero=2 kind=llama kv_heads=2 ffn=48 dropout=0.25
x=2 y=2 z=2 schedule=none microbatches=2 kind=qwen2 kv_heads=1 scheme=3d-broadcast
p=2 x=2 z=2 schedule=1f1b microbatches=3 kind=bert padding=4 chunked_products=2
p=2 d=2 y=2 z=2 schedule=v-min microbatches=3 zero=3 kind=bert tied=false hidden=30 heads=6
d=2 x=2 y=2 schedule=none microbatches=2 zero=2 scheme=2d-summa kind=bert dropout=0.25
x=4 batch=4 sequence=8 schedule=none microbatches=2 scheme=1d-sequence kind=bert padding=4
p=2 x=2 y=2 z=2 schedule=interleaved chunks=2 microbatches=4 scheme=3d-broadcast kind=bert
p=2 d=2 x=2 schedule=v-min chunks=2 microbatches=4 zero=1 scheme=1d kind=bert recompute=full
d=2 x=2 z=2 schedule=none microbatches=3 scheme=2.5d kind=bert recompute=selective padding=4
d=2 c=2 y=2 schedule=none microbatches=2 zero=1 sequence=8 kind=bert padding=4 dropout=0.25
p=2 c=4 x=2 schedule=zb-h1 microbatches=3 sequence=8 context=both ulysses=2 kind=bert padding=4
p=2 c=2 z=2 schedule=1f1b microbatches=3 sequence=8 context=all-to-all kind=bert padding=4
d=2 c=4 schedule=none microbatches=2 zero=1 sequence=8 context=both ulysses=2 kind=llama kv_heads=1
p=2 c=2 y=2 schedule=gpipe microbatches=3 sequence=4 kind=qwen2 kv_heads=2 ffn=48
p=2 x=2 y=2 schedule=1f1b microbatches=3 kind=llama kv_heads=4 head_dim=4 attention_bias=true
p=2 c=2 x=2 y=2 schedule=1f1b microbatches=3 sequence=4 kind=qwen3 kv_heads=4 head_dim=4 ffn=48
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=qwen3 kv_heads=1 scheme=2d-summa
x=2 y=2 z=2 schedule=none microbatches=2 kind=qwen3 scheme=3d-broadcast attention_bias=true
e=2 y=2 schedule=none microbatches=2 kind=qwen3 kv_heads=4 ffn=48 experts=4 recompute=full
p=2 c=2 x=2 y=2 schedule=zb-h1 microbatches=3 sequence=4 kind=olmo2 kv_heads=4 head_dim=4 ffn=48
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=olmo2 kv_heads=1 scheme=2d dropout=0.25
x=2 y=2 z=2 schedule=none microbatches=2 kind=olmo2 scheme=3d-broadcast recompute='["mlp"]'
p=2 c=2 x=2 y=2 schedule=zb-h1 microbatches=3 sequence=4 kind=gemma kv_heads=4 head_dim=4 ffn=48
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=gemma recompute='["layernorm"]'
p=2 c=2 x=2 schedule=zb-h1 microbatches=3 sequence=8 kind=gemma2 window=3 score_cap=1 logit_cap=1
x=2 y=2 schedule=none microbatches=2 zero=3 d=2 kind=gemma2 score_cap=1 recompute=selective
p=2 c=2 x=2 schedule=zb-h1 microbatches=3 sequence=8 kind=gemma3_text window=3 global_every=2
p=2 schedule=1f1b microbatches=2 kind=gemma3_text window=4 global_every=2 rope_window_theta=20
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=gemma3_text window=2 recompute='["layernorm"]'
x=2 y=2 z=2 schedule=none microbatches=2 kind=gemma3_text query_scalar=9 kv_heads=4 recompute=full
p=2 c=2 x=2 y=2 schedule=zb-h1 microbatches=3 sequence=4 kind=gpt_neox ffn=48 rope_theta=50
d=2 x=2 y=2 schedule=none microbatches=2 zero=3 kind=gpt_neox recompute='["layernorm"]' gelu=exact
x=2 y=2 schedule=none microbatches=2 kind=gpt_neox scheme=2d-summa prefetch=true dropout=0.25
p=2 c=2 x=2 y=2 schedule=zb-h1 microbatches=3 sequence=4 kind=roberta padding=4 gelu=exact
d=2 x=2 z=2 schedule=none microbatches=2 zero=3 kind=roberta ffn=48
p=2 c=2 x=2 schedule=1f1b microbatches=3 sequence=4 kind=phi3 heads=3 kv_heads=1 rope_fraction=0.5
c=2 y=2 schedule=none microbatches=2 sequence=8 kind=llama kv_heads=1 head_dim=6 mlp_bias=true
c=2 d=2 x=2 schedule=none microbatches=2 zero=2 sequence=4 hidden=30 heads=6
c=2 x=2 y=2 schedule=none microbatches=2 zero=2 sequence=4 scheme=2d-summa
d=2 x=2 y=2 schedule=none microbatches=2 zero=2 scheme=2d kind=bert recompute='["layernorm","mlp"]'
schedule=none microbatches=4 experts=4
e=2 schedule=none microbatches=2 experts=4 recompute='["layernorm","mlp"]'
e=2 schedule=none microbatches=2 experts=4 top_k=2 capacity=1 shared_experts=1
d=2 e=2 schedule=none microbatches=2 zero=1 experts=4 top_k=2 balance_bias=0.01
e=2 x=2 y=2 z=2 schedule=none microbatches=3 experts=4 top_k=2 capacity=1
p=2 e=2 x=2 z=2 schedule=1f1b microbatches=3 experts=4 kind=llama ffn=48 top_k=2 moe_every=2
p=2 d=2 e=2 schedule=dualpipe-v microbatches=4 zero=1 experts=4 bucket_mb=0.01 balance_bias=0.01
p=2 e=2 x=2 schedule=dualpipe-v microbatches=6 zero=1 experts=4 overlap_experts=true prefetch=true
d=2 e=2 x=2 schedule=none microbatches=2 zero=2 experts=4 capacity=0 recompute='["mlp_act"]'
d=2 e=2 y=2 schedule=none microbatches=2 zero=3 experts=4 shared_experts=1 hidden=30 heads=6
e=3 x=4 schedule=none batch=12 microbatches=1 scheme=1d experts=6 kind=llama kv_heads=2 ffn=48
e=2 x=4 schedule=none batch=48 microbatches=2 scheme=1d-sequence experts=4 chunked_products=2
e=2 x=2 y=2 schedule=none microbatches=2 scheme=2d experts=4 recompute=full
e=2 x=2 y=2 schedule=none microbatches=2 scheme=2d-summa experts=4 top_k=2 shared_experts=1
p=2 e=2 x=2 z=2 schedule=zb-v chunks=2 microbatches=3 scheme=2.5d experts=4 recompute=selective
p=2 e=4 y=2 schedule=interleaved chunks=2 microbatches=3 experts=4 top_k=2 keep_gathered=false
e=2 x=2 y=2 schedule=none microbatches=2 zero=2 scheme=2d-summa experts=4
p=2 x=2 z=2 d=2 schedule=gpipe microbatches=3 experts=3 top_k=2
c=2 schedule=none microbatches=2 sequence=4 experts=4 capacity=4
c=2 e=2 schedule=none microbatches=2 sequence=8 experts=4 top_k=2 capacity=2
c=3 e=2 schedule=none batch=12 zero=3 sequence=6 experts=4 capacity=0 hidden=21 heads=3
c=2 e=2 y=2 schedule=none microbatches=2 sequence=4 experts=4 capacity=0 zero=1 balance_bias=0.1
c=4 e=2 schedule=none microbatches=2 sequence=16 context=both ulysses=2 experts=4 capacity=0
p=2 c=2 e=2 schedule=zb-h1 microbatches=4 sequence=8 experts=4 capacity=0 kind=llama recompute=full
c=2 e=2 d=2 x=2 schedule=none microbatches=2 zero=2 sequence=4 experts=4 hidden=48 capacity=0
e=4 x=2 z=2 schedule=none microbatches=3 zero=3 experts=4 hidden=48
e=2 x=4 schedule=none batch=8 sequence=8 microbatches=2 scheme=1d-sequence experts=4 capacity=4
c=2 y=4 z=2 schedule=none batch=4 sequence=8 microbatches=2 experts=4 top_k=2 capacity=0
d=4 shard=2 schedule=none microbatches=2 zero=1 bucket_mb=0.01
d=4 shard=2 x=2 schedule=none microbatches=3 zero=3 scheme=1d prefetch=true hidden=30 heads=6
p=2 d=4 shard=2 schedule=v-half chunks=2 microbatches=3 zero=2 tied=false gelu=exact
d=4 shard=1 schedule=none microbatches=2 zero=3 overlap=false
d=6 shard=3 schedule=none microbatches=2 zero=3 dropout=0.25 hidden=20 heads=10
d=4 shard=2 c=2 schedule=none microbatches=2 zero=2 sequence=4 recompute=full
d=4 shard=2 e=2 schedule=none microbatches=2 zero=1 experts=4 top_k=2 balance_bias=0.01
d=4 shard=2 e=2 schedule=none microbatches=1 zero=3 experts=4
d=4 shard=2 x=2 y=2 schedule=none microbatches=1 zero=1 scheme=2d-summa kind=llama ffn=60
p=2 d=4 shard=2 x=2 schedule=1f1b microbatches=3 zero=1 kind=bert order="x d p y z c e"
p=2 x=2 schedule=1f1b microbatches=4 sequence=6 window=3 recompute=selective dropout=0.25
d=2 c=4 schedule=none microbatches=2 zero=1 sequence=16 window=3 global_every=2 kind=llama ffn=48
p=2 c=4 schedule=zb-h1 microbatches=3 sequence=16 context=both ulysses=2 window=5 dropout=0.25
p=2 d=2 x=2 schedule=1f1b microbatches=3 zero=1 sequence=6 boundaries=true separator=4
c=4 x=2 schedule=none microbatches=2 sequence=8 boundaries=true kind=llama ffn=48 dropout=0.25
c=2 z=2 schedule=none microbatches=3 sequence=8 context=all-to-all boundaries=true window=5
c=2 x=2 schedule=none microbatches=2 sequence=8 window=4 context=all-to-all experts=4 capacity=4
p=8 schedule=1f1b microbatches=4 layers_per_stage=[1,1,1,1,0,0,0,0]
p=4 schedule=interleaved chunks=2 microbatches=4 layers_per_stage=[1,0,1,0,1,0,1,0]
""".strip().splitlines()

# Four axes at once, for real ranks only.
LARGE = """
p=4 d=2 x=2 y=2 z=2 schedule=gpipe microbatches=3 zero=1
p=4 d=2 x=2 y=2 z=2 schedule=1f1b microbatches=6 zero=0 kind=llama kv_heads=4 ffn=48
p=4 d=2 x=2 y=2 z=2 schedule=interleaved chunks=2 microbatches=6 zero=3 layers=8 prefetch=true
p=4 d=2 x=2 y=2 z=2 schedule=zb-h1 microbatches=6 zero=2 chunked_products=3
p=2 d=2 c=2 x=2 y=2 z=2 schedule=1f1b microbatches=3 zero=1 sequence=4 kind=llama kv_heads=4 ffn=48
c=4 x=2 y=2 z=4 schedule=none microbatches=2 sequence=8 context=both ulysses=2 dropout=0.25
p=4 d=2 x=2 y=2 z=2 schedule=1f1b microbatches=6 zero=1 kind=bert padding=4
p=4 d=2 x=2 y=2 z=2 schedule=zb-v chunks=2 microbatches=6 zero=1 layers=8 dropout=0.25
p=4 d=2 x=2 y=2 z=2 schedule=zb-h2 microbatches=6 zero=3 tied=false gelu=exact
p=2 e=4 x=2 y=2 z=2 schedule=1f1b microbatches=3 sequence=4 experts=4 top_k=2 moe_every=2
p=2 c=2 e=2 x=2 y=2 z=2 schedule=zb-h1 microbatches=3 sequence=4 experts=4 capacity=0 kind=llama
""".strip().splitlines()

SMALL = {
    "layers": 4,
    "hidden": 24,
    "heads": 12,
    "sequence": 3,
    "vocabulary": 29,
    "steps": 3,
    "batch": 48,
    "clip": 0.5,  # less than the norm of any step
    "dtype": "float64",
}
KEYS = {key.rpartition(".")[2]: key for key in known_keys() if not key.startswith("torch.")}
# The usual matrices, of std 0.02, hardly disturb the identity: 0.2 lets every gradient matter.
WIDER = 10


def words_of(line):
    """Return {key: value} of a mix; {here} is the folder of the tests."""
    words = shlex.split(line.replace("{here}", str(Path(__file__).parent)))
    return dict(word.split("=", 1) for word in words)


def config_of(line):
    values = {**SMALL, **words_of(line)}
    options = [str(word) for key, value in values.items() for word in (f"--{KEYS[key]}", value)]
    config = load(None, options)
    return resolve(config, prod(config.sizes().values()))


@cache
def ranks(line):
    return prod(config_of(line).mesh.sizes().values())


def alone(line):
    """Return the words of a mix that also apply to the serial model."""
    words = words_of(line).items()
    serial = "model.", "train.", "data.boundaries", "data.separator"
    kept = {k: v for k, v in words if KEYS[k].startswith(serial)}
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in kept.items())


class Tokens:
    """Random batches; later sequences have fewer valid targets, and the last one has none."""

    def __init__(self, config):
        self.shape = config.train.batch, config.model.sequence
        self.vocabulary = config.model.vocabulary

    def batch(self, step):
        draw = np.random.default_rng(step)
        tokens, targets = draw.integers(0, self.vocabulary, (2, *self.shape), np.int32)
        ignored = draw.random(self.shape) < np.linspace(0, 1.1, self.shape[0])[:, None]
        return tokens, np.where(ignored, np.int32(IGNORE), targets)


class Text(token_file.Tokens):
    """Random tokens of a text of a mixture; texts have different lengths and some documents."""

    tokenizer = "random"

    def __init__(self, number, config):
        self.vocabulary = config.model.vocabulary
        length = (3 + 4 * number) * config.model.sequence + 2 + number
        draw = np.random.default_rng(number)
        self.ids = draw.integers(0, self.vocabulary, length, np.int32)
        self.sha256, self.json, self.digests = f"text {number}", "{}", frozenset()

    def end(self):
        return 0

    def __len__(self):
        return len(self.ids)

    def read(self, start, stop):
        return self.ids[start:stop]


def batches_of(config):
    """Return random batches, or those of random texts if the mix has a list of texts."""
    if isinstance(config.data.path, str):
        return Tokens(config)
    texts = [Text(number, config) for number in range(len(config.data.path))]
    return masking.batches_of(config, mixed(texts, config.data.ratio()))


class Trained(NamedTuple):
    """Loss and norm of every step; {name: (slices, block)} of the final weights."""

    totals: list
    weights: dict


def trainer_of(mesh, config):
    """Return a trainer with random batches and large matrices."""
    batches = batches_of(config) if mesh.rank == 0 else None
    trainer = Trainer(mesh, config, config.model.vocabulary, batches)
    for item in trainer.parameters:
        if item.std:
            item.value *= WIDER
    if trainer.outer:
        trainer.outer.start()
    return trainer


def train(mesh, config):
    trainer = trainer_of(mesh, config)
    steps = [trainer.step(number) for number in range(config.train.steps)]
    return trained_of(trainer, steps)


def trained_of(trainer, steps):
    """Return the results of `steps` of a trainer."""
    trainer.buckets.complete()
    weights = {
        item.name: (item.layout.slices(item.shape, trainer.mesh), item.value.copy())
        for item in trainer.parameters
    }
    return Trained([(step.loss, step.grad_norm) for step in steps], weights)


@cache
def serial(line):
    """Train a mix without words of the mesh and of [parallel], on one rank."""
    return run({}, lambda mesh: train(mesh, config_of(line)))[0]


def same(found, expected):
    """Assert that the blocks of a rank are slices of the serial weights, padded with zeros."""
    np.testing.assert_allclose(found.totals, expected.totals, rtol=1e-10)
    for name, (where, block) in found.weights.items():
        part = expected.weights[name][1][where]  # fewer rows where the block has padding
        rows, padding = block[: len(part)], block[len(part) :]
        np.testing.assert_allclose(rows, part, rtol=0, atol=1e-10, err_msg=name)
        assert not padding.any(), name


def cover(found, expected):
    """Assert that the blocks of all ranks cover all weights."""
    missing = {name: np.ones(whole.shape, bool) for name, (_, whole) in expected.weights.items()}
    for trained in found:
        for name, (where, _) in trained.weights.items():
            missing[name][where] = False
    assert not [name for name, places in missing.items() if places.any()]
