"""Settings in config.json of transformers, and settings that are rejected."""

import re
from dataclasses import replace
from math import e

import pytest

from hpc3d.checkpoints.hf_settings import (
    BERT,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    MIXTRAL,
    PHI3,
    QWEN2,
    QWEN3_MOE,
    ROBERTA,
    no_mixture,
)
from hpc3d.config.input_file import ModelConfig
from hpc3d.model.families import family_of, parameters, with_epsilon

SIZES = {"layers": 4, "hidden": 24, "heads": 12, "kv_heads": 4, "sequence": 3, "vocabulary": 29}
MODEL = ModelConfig("llama", **SIZES)
BERT_MODEL = ModelConfig("bert", layers=4, hidden=24, heads=12, sequence=3, vocabulary=29)
YARN, MSCALES = {"type": "yarn", "factor": e}, {"mscale": 1.0, "mscale_all_dim": 0.5}
PARAMETERS = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 2.0, "low_freq_factor": 3.0}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"rms_norm_eps": None}, {"norm_epsilon": 1e-6}),
        ({"num_key_value_heads": None}, {"kv_heads": None}),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, {"rope_theta": 5e5}),
        ({"rope_theta": None}, {"rope_theta": 10000.0}),
        (
            {"rope_parameters": PARAMETERS},
            {"rope_theta": 100.0, "rope_scaling": {"type": "llama3", "factor": 2.0, "low": 3.0}},
        ),
        ({"model_type": "mistral", "sliding_window": None, "head_dim": 2}, {"heads": 12}),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': .* 'silu'"),
        ({"attention_bias": True}, {"attention_bias": True, "mlp_bias": False}),
        ({"head_dim": 4}, {"head_dim": 4}),
        ({"head_dim": 2}, {"head_dim": None}),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original": 3}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 9}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "fast": 9}},
        ),
        ({"sliding_window": 4096}, "sliding_window = 4096 is unknown"),
        ({"intermediate_size": 97}, "intermediate_size = 97, but the weights have 96"),
        ({"num_attention_heads": None}, "config.json is missing or .* num_attention_heads"),
        (
            {"max_position_embeddings": None},
            "config.json is missing or .* max_position_embeddings",
        ),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "'su' is not .*yarn, longrope$"),
        ({"rope_scaling": {"rope_type": ["su"]}}, "'su'.* is not .*yarn, longrope$"),
        (
            {"rope_scaling": {"type": "yarn", "truncate": False}},
            "'yarn' with truncate is not supported; this type has the parameters factor, orig",
        ),
        (
            {"rope_scaling": {"type": "yarn", "mscale": "1"}},
            "'yarn' with mscale is not supported; this type has the parameters factor, orig",
        ),
        (
            {"rope_scaling": {"type": "linear", "beta_fast": 1}},
            "'linear' with beta_fast is not supported; this type has the parameters factor$",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is unknown"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, {"rope_fraction": 0.5}),
        (
            {"rope_scaling": {"factor": 4.0}},
            "'default' with factor is not supported; this type has no parameters$",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0, "mscale": 1}}, "with mscale is not"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 1}},  # needs both keys
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        ),
        (
            {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
            {"rope_scaling": YARN | {"attention": 1.0}},
        ),
        (
            {"rope_scaling": YARN | MSCALES},
            {"rope_scaling": YARN | {"attention": pytest.approx(1.1 / 1.05, rel=1e-12)}},
        ),
        (
            {"rope_scaling": YARN | MSCALES | {"attention_factor": 3.0}},
            {"rope_scaling": YARN | {"attention": 3.0}},
        ),
        (
            {"rope_scaling": YARN | MSCALES | {"factor": 0.5}},
            {"rope_scaling": YARN | {"factor": 0.5, "attention": 1.0}},
        ),
        ({"rope_scaling": [1]}, r"rope_scaling = \[1\]: must be a JSON object"),
    ],
)
def test_llama_config_json_maps_to_model_settings(told, found):
    settings = LLAMA.of(MODEL) | told
    measured = {"layers": 4, "hidden": 24, "ffn": 96, "vocabulary": 29}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            LLAMA.model(settings, measured)
        return
    model = LLAMA.model(settings, measured)
    assert {key: model.get(key) for key in found} == found
    assert (model["heads"], model["sequence"], model["layers"]) == (12, 3, 4)


WINDOW = {"use_sliding_window": True, "sliding_window": 9}
FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"layer_types": [FULL] * 4, "sliding_window": 9}, (0, 0)),
        ({**WINDOW, "max_window_layers": 0}, (9, 0)),
        (WINDOW, (0, 0)),  # the default of max_window_layers is 28
        ({**WINDOW, "max_window_layers": 2}, "the layers with a window .* all 4 layers or in"),
        ({**WINDOW, "max_window_layers": "2"}, "max_window_layers = '2': must be an integer"),
        ({**WINDOW, "layer_types": [SLIDING, FULL] * 2}, (9, 2)),
        ({**WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}, (9, 3)),
        ({**WINDOW, "layer_types": [FULL, SLIDING] * 2}, "the layers with a window .* are not"),
        ({**WINDOW, "layer_types": [SLIDING] * 3}, "the layers with a window .* are not"),
        ({"layer_types": [SLIDING] * 4, "sliding_window": 9}, "the layers with a window"),
        ({"use_sliding_window": True}, "use_sliding_window = true: must be false, or true with"),
        ({"use_sliding_window": 1}, "use_sliding_window = 1: must be false, or true with"),
    ],
    ids=str,
)
def test_windows_of_qwen2_map_to_model_settings(told, found):
    settings = QWEN2.of(MODEL) | told
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            QWEN2.model(settings, {"hidden": 24})
        return
    model = QWEN2.model(settings, {"hidden": 24})
    assert (model["window"], model.get("global_every", 0)) == found
    again = QWEN2.of(replace(MODEL, window=found[0], global_every=found[1]))
    assert QWEN2.model(again, {"hidden": 24}) == model


ROPES = {FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5.0}}
ROPES[SLIDING] = {"rope_type": "default", "rope_theta": 3.0}
PUBLISHED = {  # in the format of transformers 4
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 5.0,
    "rope_local_base_freq": 3.0,
    "layer_types": None,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 2,
    "cache_implementation": "hybrid",
}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (PUBLISHED, {"global_every": 3, "query_scalar": None, "rope_window_theta": 3.0}),
        (PUBLISHED, {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 8.0}}),
        ({"rope_parameters": ROPES, "rope_scaling": None}, {"rope_window_theta": 3.0}),
        ({"rope_parameters": ROPES}, {"rope_scaling": {"type": "linear", "factor": 8.0}}),
        ({"rope_theta": None, "rope_local_base_freq": None}, {"rope_theta": 1e6}),
        ({"query_pre_attn_scalar": None}, {"query_scalar": 256}),
        ({}, {"window": 2, "global_every": 2, "query_scalar": 9, "rope_window_theta": 20.0}),
        ({"sliding_window": None}, {"window": 4096}),
        ({"layer_types": [FULL] * 4}, {"window": 0}),
        ({"layer_types": [FULL, SLIDING] * 2}, "the layers with a window .* are not"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: only null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true: only"),
        ({"sliding_window_pattern": 0, "layer_types": None}, "sliding_window_pattern = 0: must"),
        (
            {"rope_parameters": {**ROPES, SLIDING: ROPES[FULL]}},
            "rope_parameters: sliding_attention must have the type default",
        ),
    ],
    ids=str,
)
def test_gemma3_config_json_maps_to_model_settings(told, found):
    keys = {"window": 2, "global_every": 2, "query_scalar": 9, "rope_window_theta": 20.0}
    model = with_epsilon(ModelConfig("gemma3_text", **SIZES, **keys))
    settings, measured = GEMMA3.of(model) | told, {"hidden": 24, "ffn": 96}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            GEMMA3.model(settings, measured)
        return
    model = GEMMA3.model(settings, measured)
    assert {key: model.get(key) for key in found} == found


GEMMA_2_2B = {  # google/gemma-2-2b, as published
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
CAPS = "attn_logit_softcapping", "final_logit_softcapping"


def test_published_config_json_of_gemma2_describes_a_model_of_its_size():
    model = ModelConfig("gemma2", **GEMMA2.model(GEMMA_2_2B, {}))
    assert (model.score_cap, model.logit_cap, model.query_scalar) == (50.0, 30.0, None)
    sizes = family_of(model).sizes(model, model.vocabulary)
    assert [sizes.window_of(layer) for layer in range(4)] == [4096, 0, 4096, 0]
    assert parameters(model).total == 2_614_341_888  # as transformers counts them
    exported = GEMMA2.of(model)
    assert {key: exported[key] for key in exported.keys() & GEMMA_2_2B.keys()} == {
        key: value for key, value in GEMMA_2_2B.items() if key in exported
    }


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (dict.fromkeys(CAPS), {"score_cap": 0.0, "logit_cap": 0.0}),
        ({CAPS[0]: 9}, {"score_cap": 9, "logit_cap": 30.0}),
        ({"query_pre_attn_scalar": 144}, {"query_scalar": 144}),
        ({"layer_types": [FULL] * 26}, {"window": 0, "global_every": 0}),
        ({"layer_types": [SLIDING] * 26}, {"window": 4096, "global_every": 0}),
        ({"layer_types": [FULL, SLIDING] * 13}, "the layers with a window .* are not"),
        ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu': only 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true: only"),
    ],
    ids=str,
)
def test_gemma2_config_json_maps_to_model_settings(told, found):
    """A cap of null is no cap, and a missing cap is the default of transformers."""
    settings = {key: value for key, value in GEMMA_2_2B.items() if key not in CAPS} | told
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            GEMMA2.model(settings, {})
        return
    model = ModelConfig("gemma2", **GEMMA2.model(settings, {}))
    assert {key: getattr(model, key) for key in found} == found
    assert GEMMA2.model(GEMMA2.of(model), {}) == GEMMA2.model(settings, {})


DIVISORS = {"short_factor": [1.0], "long_factor": [2]}
OURS = {"type": "longrope", "short": (1.0,), "long": (2,)}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({"sliding_window": -1}, "sliding_window = -1: must be a positive integer"),
        ({"rope_scaling": {"rope_type": "su2"}}, "rope_type = 'su2' is not supported; use "),
        (
            {"rope_scaling": {"rope_type": "longrope", **DIVISORS}, "max_position_embeddings": 9},
            OURS | {"original": 4096, "factor": 1.0},
        ),
        (
            {"rope_scaling": {"type": "su", **DIVISORS, "original_max_position_embeddings": 7}}
            | {"original_max_position_embeddings": 4, "max_position_embeddings": 18},
            OURS | {"original": 4, "factor": 4.5},
        ),
        (
            {"rope_parameters": {"type": "yarn", **DIVISORS, "factor": 9, "attention_factor": 2}},
            OURS | {"original": 4096, "factor": 9, "attention": 2},
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": None, "short_factor": 3}}
            | {"original_max_position_embeddings": "4"},
            {"type": "longrope", "short": 3, "original": "4"},  # the rules of [model] reject this
        ),
    ],
)
def test_phi3_config_json_maps_to_model_settings(told, found):
    model = ModelConfig("phi3", **SIZES, rope_fraction=0.5)
    settings, measured = PHI3.of(with_epsilon(model)), {"hidden": 24, "ffn": 96}
    assert PHI3.model(settings, measured)["rope_fraction"] == 0.5
    assert PHI3.model(settings | {"rms_norm_eps": None}, measured)["norm_epsilon"] == 1e-5
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            PHI3.model(settings | told, measured)
        return
    assert PHI3.model(settings | told, measured)["rope_scaling"] == found


def test_phi3_is_exported_with_its_original_length_and_with_no_other_rope_scaling():
    model = with_epsilon(ModelConfig("phi3", **SIZES, rope_fraction=0.5))
    scaling = OURS | {"original": 2.0, "factor": 1.5}
    settings = PHI3.of(replace(model, rope_scaling=scaling))
    assert settings["original_max_position_embeddings"] == 2
    found = PHI3.model(settings, {"hidden": 24, "ffn": 96})
    assert found["rope_scaling"] == scaling
    with pytest.raises(ValueError, match=r"the type linear: Phi3ForCausalLM .* only longrope; "):
        PHI3.of(replace(model, rope_scaling={"type": "linear", "factor": 2.0}))


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"sequence": 3, "gelu": "exact"}),
        ({"max_position_embeddings": 7}, "max_position_embeddings = 7, but the weights have 5"),
        ({"type_vocab_size": 2}, "type_vocab_size = 2: only 1 is supported"),
        ({"pad_token_id": 0}, "pad_token_id = 0: only 1 is supported"),
        ({"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new': only 'gelu' is supported"),
    ],
)
def test_roberta_config_json_maps_to_model_settings(told, found):
    model = with_epsilon(replace(BERT_MODEL, kind="roberta", gelu="exact"))
    settings = ROBERTA.of(model) | told
    measured = {"layers": 4, "hidden": 24, "ffn": 96, "vocabulary": 29, "sequence": 3}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            ROBERTA.model(settings, measured)
        return
    read = ROBERTA.model(settings, measured)
    assert {key: read.get(key) for key in found} == found


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            PHI3,
            {"attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
        ),
        (PHI3, {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}),
        (QWEN2, {"use_mrope": False}),
        (GEMMA, {"hidden_act": "gelu", "hidden_activation": None}),
        (GEMMA, {"hidden_activation": "gelu_pytorch_tanh"}),
    ],
)
def test_inactive_keys_of_published_config_json_files_are_accepted(settings, told):
    given, measured = settings.of(with_epsilon(MODEL)), {"hidden": 24, "ffn": 96}
    assert settings.model(given | told, measured) == settings.model(given, measured)


@pytest.mark.parametrize(
    ("settings", "told", "message"),
    [
        (PHI3, {"attention_bias": True}, "attention_bias = true is unknown"),
        (PHI3, {"full_attn_mod": 2}, "full_attn_mod = 2 is unknown"),
        (QWEN2, {"use_mrope": True}, "use_mrope = true is unknown"),
        (GEMMA, {"hidden_act": "relu"}, "hidden_act = 'relu': only 'gelu_pytorch_tanh'"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is unknown"),
    ],
)
def test_published_keys_that_change_the_output_are_rejected(settings, told, message):
    given, measured = settings.of(with_epsilon(MODEL)), {"hidden": 24, "ffn": 96}
    with pytest.raises(ValueError, match=message):
        settings.model(given | told, measured)


def test_roberta_with_another_gelu_than_that_of_its_head_is_not_exported():
    with pytest.raises(ValueError, match=r"model.gelu = tanh: .* train with model.gelu = exact$"):
        ROBERTA.of(with_epsilon(replace(BERT_MODEL, kind="roberta")))


def test_gpt_neox_settings_map_to_model_settings():
    model = ModelConfig("gpt_neox", layers=4, hidden=24, heads=12, rope_fraction=0.5)
    settings, measured = GPT_NEOX.of(with_epsilon(model)), {"hidden": 24, "ffn": 96}
    assert GPT_NEOX.model(settings, measured)["rope_fraction"] == 0.5
    del settings["rotary_pct"]
    assert GPT_NEOX.model(settings, measured)["rope_fraction"] == 0.25
    with pytest.raises(ValueError, match="use_parallel_residual = false: only true is supported"):
        GPT_NEOX.model(settings | {"use_parallel_residual": False}, measured)


MIXTURE = ModelConfig("llama", **SIZES, experts=6, top_k=3, capacity=0.0, balance_loss=0.015)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"top_k": 3, "capacity": 0.0, "balance_loss": 0.015, "z_loss": 0.0}),
        ({"router_aux_loss_coef": 0.4, "num_experts_per_tok": 2}, {"balance_loss": 0.2}),
        ({"router_aux_loss_coef": None}, {"balance_loss": 0.00075}),
        ({"num_experts_per_tok": None}, {"top_k": 2}),
        ({"rms_norm_eps": None, "rope_theta": None}, {"norm_epsilon": 1e-5, "rope_theta": 1e6}),
        ({"sliding_window": None, "output_router_logits": True}, {"moe_every": 1, "window": 0}),
        ({"sliding_window": 4096}, {"window": 4096}),
        ({"sliding_window": 0}, "sliding_window = 0: must be a positive integer"),
        ({"sliding_window": "9"}, "sliding_window = '9': must be a positive integer"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1: .* from 2 to 6"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7: .* from 2 to 6"),
        ({"num_experts_per_tok": 2.0}, "num_experts_per_tok = 2.0: .* from 2 to 6"),
        ({"num_local_experts": 8}, "num_local_experts = 8, but the weights have 6"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: only 0.0 is"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef = -1: .* nonnegative"),
        ({"router_aux_loss_coef": True}, "router_aux_loss_coef = true: .* nonnegative"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu': .* 'silu'"),
    ],
)
def test_mixtral_config_json_maps_to_model_settings(told, found):
    settings = MIXTRAL.of(MIXTURE) | told
    measured = {"layers": 4, "hidden": 24, "ffn": 96, "vocabulary": 29, "experts": 6}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            MIXTRAL.model(settings, measured)
        return
    model = MIXTRAL.model(settings, measured)
    assert {key: model.get(key) for key in found} == found
    assert no_mixture(MIXTURE, MIXTRAL) is None


MOE = with_epsilon(replace(MIXTURE, kind="qwen3", moe_every=2))
BETWEEN = "the layers with experts .* are not supported; every n-th layer must have experts"


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"moe_every": 2, "balance_loss": 0.015, "window": 0}),
        ({"decoder_sparse_step": 1}, {"moe_every": 1, "balance_loss": 0.0075}),
        ({"decoder_sparse_step": None, "intermediate_size": 3}, {"moe_every": 1}),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}, {"moe_every": 2}),
        ({"mlp_only_layers": [0]}, {"moe_every": 2}),
        ({"decoder_sparse_step": 3}, {"moe_every": 3}),
        ({"mlp_only_layers": [1]}, {"moe_every": 4}),
        ({"mlp_only_layers": [3]}, BETWEEN),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0]}, BETWEEN),
        ({"decoder_sparse_step": 5}, BETWEEN),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be a positive integer"),
        ({"mlp_only_layers": 1}, "mlp_only_layers = 1 a list of layers"),
        ({"intermediate_size": 3}, "intermediate_size = 3 of the layers without experts differs "),
        (WINDOW, {"window": 9}),
        ({"use_sliding_window": True}, {"window": 4096}),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0: must be a pos"),
        ({"sliding_window": 9, "max_window_layers": 2}, {"window": 0}),
        ({"norm_topk_prob": False}, "norm_topk_prob = false: only true is supported"),
    ],
    ids=str,
)
def test_qwen3_moe_config_json_maps_to_model_settings(told, found):
    settings = QWEN3_MOE.of(MOE) | told
    measured = {"layers": 4, "hidden": 24, "ffn": 96, "vocabulary": 29, "experts": 6}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            QWEN3_MOE.model(settings, measured)
        return
    model = QWEN3_MOE.model(settings, measured)
    assert {key: model.get(key) for key in found} == found


@pytest.mark.parametrize("window", [0, 9])
def test_qwen3_moe_settings_are_read_as_they_were_written(window):
    settings = QWEN3_MOE.of(replace(MOE, window=window))
    assert settings["moe_intermediate_size"] == settings["intermediate_size"] == 96
    model = QWEN3_MOE.model(settings, {"layers": 4, "hidden": 24, "ffn": 96, "experts": 6})
    found = replace(MOE, ffn=96, capacity=0, z_loss=0, window=window)
    assert {key: getattr(found, key) for key in model} == model | {"head_dim": None}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("shared_experts", 2, r"no shared experts \(0\)"),
        ("moe_every", 2, r"experts in every block \(1\)"),
        ("balance_bias", 0.01, r"no router bias \(0.0\)"),
        (
            "top_k",
            1,
            r"gives a single expert the gate weight 1 .* \(set model.top_k to 2 or more\)",
        ),
    ],
)
def test_mixture_settings_that_mixtral_lacks_are_reported(key, value, said):
    problem = no_mixture(replace(MIXTURE, **{key: value}), MIXTRAL)
    assert re.match(rf"model.{key} = {value}: Mixtral .*{said}$", problem)


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"gelu": "tanh"}),
        ({"resid_pdrop": 0.25}, {"gelu": "tanh", "dropout": 0.25}),
        (dict.fromkeys(GPT2.dropouts, 0.0), {"gelu": "tanh", "dropout": 0.0}),
        ({"resid_pdrop": 0.25, "attn_pdrop": 0.5}, {"gelu": "tanh"}),
        ({"num_attention_heads": 3}, {"gelu": "tanh", "heads": 3}),
        ({"activation_function": "gelu"}, {"gelu": "exact"}),
    ],
)
def test_gpt2_config_json_maps_to_model_settings(told, found):
    """The dropout rate requires that all given rates agree; the default GELU is gelu_new."""
    assert GPT2.model(told, {"hidden": 24}) == {"hidden": 24, **found}


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ({}, {"gelu": "tanh", "norm_epsilon": 1e-12, "dropout": 0.0, "heads": 12}),
        ({"hidden_act": None}, {"gelu": "exact"}),
        ({"layer_norm_eps": 1e-5, "pad_token_id": 7}, {"norm_epsilon": 1e-5}),
        ({"pooler_type": "first_token_transform"}, {"gelu": "tanh"}),
        ({"attention_probs_dropout_prob": 0.25}, {"dropout": None}),
        ({"hidden_act": "relu"}, "hidden_act = 'relu' is not .* gelu_new"),
        ({"is_decoder": True}, "is_decoder = true: only false is"),
        ({"add_cross_attention": True}, "add_cross_attention = true: only false is"),
        ({"type_vocab_size": 1}, "type_vocab_size = 1: only 2 is"),
        (
            {"position_embedding_type": "relative_key"},
            "position_embedding_type = 'relative_key': only 'absolute' is",
        ),
        ({"embedding_size": 128}, "embedding_size = 128 is unknown"),
    ],
)
def test_bert_config_json_maps_to_model_settings(told, found):
    settings = BERT.of(with_epsilon(BERT_MODEL)) | told
    measured = {"layers": 4, "hidden": 24, "ffn": 96, "vocabulary": 29, "sequence": 3}
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            BERT.model(settings, measured)
        return
    model = BERT.model(settings, measured)
    assert {key: model.get(key) for key in found} == found
