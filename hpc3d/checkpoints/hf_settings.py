"""Conversion between config.json of Hugging Face `transformers` and the `[model]` section.

An unknown key is an error, because it may change the output of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc3d.console.sanitize import as_written
from hpc3d.model.layers import LayerNorm
from hpc3d.ops.rotary import SCALINGS

if TYPE_CHECKING:
    from hpc3d.config.input_file import ModelConfig

CONFIG = "config.json"
# Hugging Face tokenizer files: tokenizer, settings, special tokens, and chat template.
TOKENIZER_FILES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES += ("chat_template.jinja",)
GENERATION = "generation_config.json"  # the publisher's generation settings
GELU = {"tanh": "gelu_new", "exact": "gelu"}
_FUNCTIONS = {
    **{theirs: ours for ours, theirs in GELU.items()},
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu_python": "exact",
}
_LENGTH, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_SCALING = {  # maps keys of model.rope_scaling to those of config.json
    "factor": "factor",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "original": _ORIGINAL,
    "fast": "beta_fast",
    "slow": "beta_slow",
    "attention": "attention_factor",
    "short": "short_factor",
    "long": "long_factor",
}
_DYNAMIC = "dynamic"  # type of RoPE scaling without a length of its own in config.json
_YARN, _LONGROPE = "yarn", "longrope"
_MSCALES = "mscale", "mscale_all_dim"  # YaRN: these set the default of attention_factor
_OF_MIXTRAL = {  # maps [model] keys to (value required by Mixtral, description)
    "shared_experts": (0, "no shared experts"),
    "moe_every": (1, "experts in every block"),
    "balance_bias": (0.0, "no router bias"),
    "attention_bias": (False, "no attention biases"),
    "mlp_bias": (False, "no biases of experts"),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"  # types of layers in config.json
_BALANCE = "router_aux_loss_coef"
_LARGEST = 1e6  # upper limit of router_aux_loss_coef
# Keys that concern tokenization, files or training and do not affect a model's output.
_HARMLESS = """
    _name_or_path architectures auto_map bos_token_id dtype eos_token_id gradient_checkpointing
    id2label initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id
    model_type n_ctx output_attentions output_hidden_states output_past pad_token_id prefix
    pretraining_tp problem_type return_dict sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tie_word_embeddings tokenizer_class torch_dtype torchscript
    transformers_version use_bfloat16 use_cache
"""
_GELU_OF_GEMMA = "gelu_pytorch_tanh"
_WINDOW = 4096  # default window of Gemma 2 and Gemma 3
_CAPS = {"attn_logit_softcapping": "score_cap", "final_logit_softcapping": "logit_cap"}
# Keys of published config.json files that do not affect the output with these values.
_INACTIVE = {
    "attention_bias": False,
    "full_attn_mod": 1,
    "hidden_activation": _GELU_OF_GEMMA,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "use_mrope": False,
}

# BERT keys for the activation function and for tasks other than masked language modeling.
_OF_BERT = """
    chunk_size_feed_forward classifier_dropout directionality hidden_act pooler_fc_size
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
"""
# Other keys of Gemma 2 and Gemma 3.
_OF_GEMMA2 = """
    cache_implementation layer_types query_pre_attn_scalar sliding_window sliding_window_pattern
"""
_OF_GEMMA3 = f"{_OF_GEMMA2} _sliding_window_pattern rope_local_base_freq"
# Other keys of GPT-NeoX.
_OF_NEOX = """
    classifier_dropout hidden_act rope_parameters rope_scaling rotary_emb_base rotary_pct
"""
# Other keys of Qwen3-MoE.
_OF_QWEN3_MOE = "intermediate_size max_window_layers mlp_only_layers use_sliding_window"


class Settings(NamedTuple):
    """Conversion of a family's config.json to and from the `[model]` section.

    sizes     dict from a key of config.json to the equivalent key of [model]
    fixed     dict from a key of config.json to its only supported value
    dropouts  keys of the dropout rates; hpc3d has a single rate
    others    all other keys of config.json
    written   function that returns the other keys of config.json for a ModelConfig (export)
    told      function that returns further keys of [model], given config.json and the
              keys known so far (import)
    windows   keys of [model] for sliding windows that config.json supports
    usual     dict from each key of config.json that null disables to its default in transformers
    """

    sizes: Mapping[str, str]
    fixed: Mapping[str, Any]
    dropouts: tuple[str, ...]
    others: frozenset[str]
    written: Callable[[ModelConfig], dict[str, Any]]
    told: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    windows: frozenset[str] = frozenset()
    usual: Mapping[str, Any] = MappingProxyType({})

    def of(self, model: ModelConfig) -> dict[str, Any]:
        """Return the family's config.json settings for a model configuration."""
        return {
            **self.fixed,
            **{theirs: getattr(model, ours) for theirs, ours in self.sizes.items()},
            **dict.fromkeys(self.dropouts, model.dropout),
            **self.written(model),
        }

    def model(self, settings: Mapping[str, Any], measured: Mapping[str, int]) -> dict[str, Any]:
        """Derive the `[model]` section from config.json and `measured`, the sizes of the arrays.

        Raises ValueError if config.json contradicts the array sizes or has unsupported settings.
        """
        self._refuse(settings)
        settings, model = {**self.usual, **settings}, dict(measured)
        for theirs, ours in self.sizes.items():
            if ours not in measured and settings.get(theirs) is not None:
                model[ours] = settings[theirs]
            elif ours in measured and settings.get(theirs, measured[ours]) != measured[ours]:
                value = settings[theirs]
                raise ValueError(
                    f"{CONFIG}: {theirs} = {as_written(value)}, but the weights have "
                    f"{measured[ours]}"
                )
        rates = self.rates(settings)
        if rates and rates == rates[:1] * len(rates):
            model["dropout"] = rates[0]
        told = {key: value for key, value in settings.items() if value is not None}
        return model | self.told(told, model)

    def rates(self, settings: Mapping[str, Any]) -> list[Any]:
        """Return the dropout rates that are set in a config.json."""
        return [settings[key] for key in self.dropouts if key in settings]

    def _refuse(self, settings: Mapping[str, Any]) -> None:
        known = {*self.sizes, *self.dropouts, *self.others, *_HARMLESS.split()}
        for key, value in settings.items():
            if key in self.fixed and value != self.fixed[key]:
                only = self.fixed[key]
                raise ValueError(
                    f"{CONFIG}: {key} = {as_written(value)}: only {as_written(only)} is supported"
                )
            if key not in known | self.fixed.keys() and value not in (None, _INACTIVE.get(key)):
                raise ValueError(
                    f"{CONFIG}: {key} = {as_written(value)} is unknown; remove it if it does not "
                    "affect the output of the model"
                )


def _bert_written(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.ffn or 4 * model.hidden,
        "hidden_act": GELU[model.gelu],
        "pad_token_id": model.padding,
    }


def _bert_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    gelu = _gelu_of(settings, "hidden_act", GELU["exact"])  # the default in transformers
    return {"gelu": gelu, "norm_epsilon": settings.get("layer_norm_eps", 1e-12)}


def _roberta_written(model: ModelConfig) -> dict[str, Any]:
    if model.gelu != "exact":
        raise ValueError(
            f"model.gelu = {model.gelu}: the head of RoBERTa has the exact GELU, so this model "
            "cannot be exported to transformers; train with model.gelu = exact"
        )
    size, rows = model.ffn or 4 * model.hidden, model.sequence + 2
    return {"intermediate_size": size, "max_position_embeddings": rows}


def _roberta_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    key, rows = "max_position_embeddings", model["sequence"] + 2
    if settings.get(key, rows) != rows:
        raise ValueError(
            f"{CONFIG}: {key} = {as_written(settings[key])}, but the weights have {rows}"
        )
    return _bert_told(settings, model)


def _gelu_of(settings: Mapping[str, Any], key: str, usual: str) -> str:
    """Return hpc3d's name of the activation function `settings[key]`, by default `usual`."""
    name = str(settings.get(key, usual))
    if name not in _FUNCTIONS:
        raise ValueError(
            f"{CONFIG}: {key} = {name!r} is not supported; use one of {', '.join(_FUNCTIONS)}"
        )
    return _FUNCTIONS[name]


def _gpt2_written(model: ModelConfig) -> dict[str, Any]:
    return {"activation_function": GELU[model.gelu]}


def _gpt2_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    gelu = _gelu_of(settings, "activation_function", GELU["tanh"])
    if settings.get("n_inner", 4 * model["hidden"]) != 4 * model["hidden"]:
        raise ValueError(
            f"{CONFIG}: n_inner = {as_written(settings['n_inner'])}: only 4 n_embd is supported"
        )
    heads = settings.get("n_head", settings.get("num_attention_heads"))
    return {"gelu": gelu, **({} if heads is None else {"heads": heads})}


def _llama_written(model: ModelConfig) -> dict[str, Any]:
    sizes = {
        "intermediate_size": model.ffn or 4 * model.hidden,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
    }
    return {**sizes, "rope_theta": model.rope_theta, **_rope_written(model)}


def _rope_written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json for the RoPE scaling.

    For the type "dynamic", the original length is `max_position_embeddings`.
    """
    if model.rope_scaling is None:
        return {"rope_scaling": None}
    ours = {"type": "llama3", **model.rope_scaling}
    kind = ours.pop("type")
    if "original" in ours:
        ours["original"] = int(ours["original"])
    length = {_LENGTH: ours.pop("original")} if kind == _DYNAMIC else {}
    scaling = {_SCALING[key]: value for key, value in ours.items()}
    return {**length, "rope_scaling": {"rope_type": kind, **scaling}}


def _llama_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    for theirs in ("num_attention_heads", _LENGTH):
        if theirs not in settings:
            raise ValueError(f"{CONFIG} is missing or does not contain {theirs}")
    heads, width = settings["num_attention_heads"], settings.get("head_dim")
    whole = type(heads) is type(width) is int and heads * width == model["hidden"]
    epsilon = settings.get("rms_norm_eps", 1e-6)  # the default of transformers
    return {"norm_epsilon": epsilon, "head_dim": None if whole else width, **_rope(settings)}


def no_mixture(model: ModelConfig, settings: Settings, name: str = "Mixtral") -> str | None:
    """Return an error message if a mixture of experts of `transformers` does not support `model`.

    `settings` is the conversion of the mixture's config.json, and `name` is its name.
    """
    for key, (only, what) in _OF_MIXTRAL.items():
        if key not in settings.sizes.values() and (value := getattr(model, key)) != only:
            return f"model.{key} = {value}: {name} has {what} ({only})"
    if model.top_k == 1:
        return (
            f"model.top_k = 1: {name} gives a single expert the gate weight 1 instead of its "
            "router probability (set model.top_k to 2 or more)"
        )
    return None


def _mistral_written(model: ModelConfig) -> dict[str, Any]:
    return {**_llama_written(model), "sliding_window": model.window or None}


def _mistral_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama_told(settings, model), "window": _window(settings)}


def _window(settings: Mapping[str, Any]) -> int:
    """Return the sliding window in a config.json, or 0 if it has none."""
    window = settings.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        only = "must be a positive integer, or null for no window"
        raise ValueError(f"{CONFIG}: sliding_window = {as_written(window)}: {only}")
    return window or 0


def _used_window(settings: Mapping[str, Any]) -> int:
    """Return the sliding window in a config.json, or 0 unless `use_sliding_window` is true."""
    window, used = _window(settings), settings.get("use_sliding_window", False)
    if type(used) is not bool or (used and not window):
        only = "must be false, or true with a sliding_window"
        raise ValueError(f"{CONFIG}: use_sliding_window = {as_written(used)}: {only}")
    return window if used else 0


def _mixtral_written(model: ModelConfig) -> dict[str, Any]:
    coefficient = model.balance_loss * (model.layers // model.moe_every) / model.top_k
    return {**_mistral_written(model), _BALANCE: float(f"{coefficient:.15g}")}


def _mixtral_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}  # the defaults of transformers
    return {**_mistral_told({**usual, **settings}, model), **_mixture_told(settings, model)}


def _qwen3_moe_written(model: ModelConfig) -> dict[str, Any]:
    written = {**_mixtral_written(model), "use_sliding_window": model.window > 0}
    return {
        **written,
        "moe_intermediate_size": written["intermediate_size"],
        "mlp_only_layers": [],
    }


def _qwen3_moe_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    if settings.get("norm_topk_prob") is not True:
        raise ValueError(
            f"{CONFIG}: norm_topk_prob is not true: only normalized router weights are supported"
        )
    window = _used_window({"sliding_window": 4096, **settings})  # the default of transformers
    model = {**model, "moe_every": _mixture_interval(settings, model)}
    told = {"window": window, "moe_every": model["moe_every"]}
    return {**_llama_told(settings, model), **_mixture_told(settings, model), **told}


def _mixture_interval(settings: Mapping[str, Any], model: Mapping[str, Any]) -> int:
    """Return `moe_every`, given the keys of Qwen3-MoE for layers with an MLP."""
    step, dense = settings.get("decoder_sparse_step", 1), settings.get("mlp_only_layers", [])
    if type(step) is not int or step < 1 or not isinstance(dense, list):
        raise ValueError(
            f"{CONFIG}: decoder_sparse_step = {as_written(step)} must be a positive integer, and "
            f"mlp_only_layers = {as_written(dense)} a list of layers"
        )
    layers = range(model["layers"])
    mixtures = [n for n in layers if (n + 1) % step == 0 and n not in dense]
    every = mixtures[0] + 1 if mixtures else 0
    if not every or mixtures != [*layers[every - 1 :: every]]:
        raise ValueError(
            f"{CONFIG}: the layers with experts (decoder_sparse_step = {step}, mlp_only_layers = "
            f"{dense}) are not supported; every n-th layer must have experts (model.moe_every)"
        )
    wide, narrow = settings.get("intermediate_size", 6144), model["ffn"]
    if every > 1 and wide != narrow:
        raise ValueError(
            f"{CONFIG}: intermediate_size = {as_written(wide)} of the layers without experts "
            f"differs from moe_intermediate_size = {narrow}; only equal sizes are supported "
            "(model.ffn)"
        )
    return every


def _mixture_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keys of config.json for a mixture of experts to keys of [model].

    `transformers` computes a single load-balancing loss over all layers, from token fractions that
    sum to top_k. hpc3d adds up one loss per layer, each computed from fractions that sum to 1.
    """
    top_k, coefficient = model.get("top_k", 2), settings.get(_BALANCE, 0.001)
    if type(top_k) is not int or not 2 <= top_k <= model["experts"]:
        raise ValueError(
            f"{CONFIG}: num_experts_per_tok = {as_written(top_k)}: must be from 2 to "
            f"{model['experts']}; with 1, transformers sets the gate weight to 1, but hpc3d uses "
            "the router probability"
        )
    if type(coefficient) not in (int, float) or not 0 <= coefficient <= _LARGEST:
        raise ValueError(
            f"{CONFIG}: {_BALANCE} = {as_written(coefficient)}: must be a nonnegative number"
        )
    balance = coefficient * top_k / (model["layers"] // model.get("moe_every", 1))
    return {
        **{key: only for key, (only, _) in _OF_MIXTRAL.items() if key not in model},
        "top_k": top_k,
        "capacity": 0.0,
        "balance_loss": float(f"{balance:.12g}"),
        "z_loss": 0.0,
    }


def _qwen3_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return _qwen2_told({"head_dim": 128, **settings}, model)  # the default of transformers


def _neox_written(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.ffn or 4 * model.hidden,
        "hidden_act": GELU[model.gelu],
        "rotary_emb_base": model.rope_theta,
        "rotary_pct": model.rope_fraction,
        **_rope_written(model),
    }


def _neox_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    rope = {
        "rope_theta": settings.get("rotary_emb_base", 10000.0),
        "partial_rotary_factor": settings.get("rotary_pct", 0.25),  # the default of transformers
        **settings,
    }
    gelu = _gelu_of(settings, "hidden_act", GELU["exact"])
    return {"gelu": gelu, "norm_epsilon": settings.get("layer_norm_eps", 1e-5), **_rope(rope)}


def _gemma_written(model: ModelConfig) -> dict[str, Any]:
    return {**_llama_written(model), "hidden_act": _GELU_OF_GEMMA}


def _gemma_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    name = settings.get("hidden_act", _GELU_OF_GEMMA)
    if name not in (_GELU_OF_GEMMA, "gelu"):  # transformers treats "gelu" as its tanh form
        raise ValueError(
            f"{CONFIG}: hidden_act = {as_written(name)}: only {_GELU_OF_GEMMA!r} is supported"
        )
    return _llama_told({"head_dim": 256, **settings}, model)  # the default of transformers


def _alternating_written(model: ModelConfig) -> dict[str, Any]:
    """Return the keys that Gemma 2 and Gemma 3 have in common."""
    kinds = _layer_types(model.layers, model.global_every)
    return {
        **_llama_written(model),
        # transformers needs a window even if no layer has one
        "sliding_window": model.window or model.sequence,
        "layer_types": kinds if model.window else [_FULL] * model.layers,
        "query_pre_attn_scalar": model.query_scalar or model.head_width,
    }


def _alternating_told(
    settings: Mapping[str, Any], model: Mapping[str, Any], every: int
) -> dict[str, Any]:
    """Return the keys of [model] that Gemma 2 and Gemma 3 have in common.

    By default, every `every`-th block has no window.
    """
    usual = {"sliding_window": _WINDOW, "head_dim": 256, "query_pre_attn_scalar": 256}
    told = {**usual, **settings}  # with the defaults of transformers
    every = told.get("sliding_window_pattern", told.get("_sliding_window_pattern", every))
    if type(every) is not int or every < 1:
        raise ValueError(
            f"{CONFIG}: sliding_window_pattern = {as_written(every)}: must be a positive integer"
        )
    layers, scalar = model["layers"], told["query_pre_attn_scalar"]
    return {
        **_llama_told(told, model),
        **_windows(told.get("layer_types", _layer_types(layers, every)), layers, _window(told)),
        "query_scalar": None if scalar == told["head_dim"] else scalar,
    }


def _gemma2_written(model: ModelConfig) -> dict[str, Any]:
    caps = {theirs: getattr(model, ours) or None for theirs, ours in _CAPS.items()}
    return {**_alternating_written(model), **caps}  # transformers would divide by a cap of 0


def _gemma2_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return _alternating_told(settings, model, every=2)


def _gemma3_written(model: ModelConfig) -> dict[str, Any]:
    return {**_alternating_written(model), "rope_local_base_freq": model.rope_window_theta}


def _gemma3_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, **settings}
    parts = settings.get("rope_parameters")
    if isinstance(parts, dict) and {*parts} <= {_FULL, _SLIDING}:
        rope = {**rope, "rope_parameters": parts.get(_FULL, {})}
        local = {"rope_theta": rope["rope_local_base_freq"]}
        local = _rope({**local, "rope_parameters": parts.get(_SLIDING, {})})
        if local.keys() != {"rope_theta"}:
            raise ValueError(f"{CONFIG}: rope_parameters: {_SLIDING} must have the type default")
        rope["rope_local_base_freq"] = local["rope_theta"]
    told = _alternating_told(rope, model, every=6)
    return {**told, "rope_window_theta": rope["rope_local_base_freq"]}


def _olmo2_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    return _llama_told({"rms_norm_eps": 1e-5, **settings}, model)  # the default of transformers


def _phi3_written(model: ModelConfig) -> dict[str, Any]:
    written = {**_mistral_written(model), "partial_rotary_factor": model.rope_fraction}
    scaling = written["rope_scaling"] or {}
    if scaling and scaling["rope_type"] != _LONGROPE:
        raise ValueError(
            f"model.rope_scaling has the type {scaling['rope_type']}: Phi3ForCausalLM in "
            f"transformers supports only {_LONGROPE}; train with it, or without rope_scaling"
        )
    return written | {key: value for key, value in scaling.items() if key == _ORIGINAL}


def _phi3_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Convert config.json. In older files, the types "su" and "yarn" also mean "longrope"."""
    told = {_ORIGINAL: 4096, "rms_norm_eps": 1e-5, **settings}  # the defaults of transformers
    name = "rope_parameters" if "rope_parameters" in told else "rope_scaling"
    table = told.get(name)
    if isinstance(table, dict):
        kind = table.get("rope_type", table.get("type"))
        kind = _LONGROPE if kind in ("su", _YARN) else kind
        told[name] = {**table, "rope_type": kind or "default"}
    return _mistral_told(told, model)


def _qwen2_written(model: ModelConfig) -> dict[str, Any]:
    if not model.window:
        return {**_llama_written(model), "use_sliding_window": False}
    kinds = _layer_types(model.layers, model.global_every)
    windows = {"use_sliding_window": True, "max_window_layers": 0, "layer_types": kinds}
    return {**_mistral_written(model), **windows}


def _qwen2_told(settings: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    layers, window = model["layers"], _used_window(settings)
    first = settings.get("max_window_layers", 28)
    if type(first) is not int:
        raise ValueError(f"{CONFIG}: max_window_layers = {as_written(first)}: must be an integer")
    full = min(max(first, 0), layers) if window else layers  # the first layers have no window
    usual = [_FULL] * full + [_SLIDING] * (layers - full)
    kinds = settings.get("layer_types", usual)
    return {**_llama_told(settings, model), **_windows(kinds, layers, window)}


def _layer_types(layers: int, every: int) -> list[str]:
    """Return the attention type of each block: a window, except in every `every`-th block."""
    full = [every > 0 and (layer + 1) % every == 0 for layer in range(layers)]
    return [_FULL if each else _SLIDING for each in full]


def _windows(kinds: Any, layers: int, window: int) -> dict[str, Any]:
    """Return the keys of [model] for a window in the blocks with the types `kinds`."""
    if kinds == [_FULL] * layers:
        return {"window": 0}
    every = kinds.index(_FULL) + 1 if isinstance(kinds, list) and _FULL in kinds else 0
    if window and every != 1 and kinds == _layer_types(layers, every):
        return {"window": window, "global_every": every}
    where = f"in all {layers} layers or in every n-th layer, with n at least 2"
    raise ValueError(
        f"{CONFIG}: the layers with a window (layer_types, max_window_layers) are not supported; "
        f"all layers can have one, or {_FULL!r} {where}"
    )


def _rope(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Read rope_theta and rope_scaling (merged into rope_parameters in transformers 5)."""
    name = "rope_parameters" if "rope_parameters" in settings else "rope_scaling"
    table = settings.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"{CONFIG}: {name} = {as_written(table)}: must be a JSON object")
    set_keys = {key: value for key, value in table.items() if value is not None}
    table = {"rope_theta": settings.get("rope_theta", 10000.0), **set_keys}
    kind = str(table.pop("rope_type", table.pop("type", "default")))
    found = {"rope_theta": table.pop("rope_theta")}
    share = table.pop("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if share != 1:
        found["rope_fraction"] = share
    if kind == "default" and not table:
        return found
    if kind not in ("default", *SCALINGS):
        raise ValueError(
            f"{CONFIG}: rope_type = {kind!r} is not supported; use default, {', '.join(SCALINGS)}"
        )
    form = SCALINGS.get(kind)
    keys = [_SCALING[key] for key in (*form.keys, *form.others)] if form else []
    scaling = _scaling(kind, table, settings)
    if surplus := sorted(scaling.keys() - keys):
        known = f"the parameters {', '.join(keys)}" if keys else "no parameters"
        raise ValueError(
            f"{CONFIG}: rope_type = {kind!r} with {', '.join(surplus)} is not supported; this "
            f"type has {known}"
        )
    ours = {key: scaling[theirs] for key, theirs in _SCALING.items() if theirs in scaling}
    return {**found, "rope_scaling": {"type": kind, **ours}}


def _scaling(kind: str, table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of RoPE scaling with the values that `transformers` derives.

    `table` contains the parameters in config.json, and `settings` its other keys.
    """
    found = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    length, scales = settings.get(_LENGTH), [found.get(key, 0) for key in _MSCALES]
    if kind == _DYNAMIC:
        found[_ORIGINAL] = length
    elif kind == _LONGROPE:
        original = found[_ORIGINAL] = settings.get(_ORIGINAL, found.get(_ORIGINAL, length))
        if _is_size(length) and _is_size(original) and original:
            found.setdefault("factor", max(1.0, length / original))
    elif kind == _YARN and all(map(_is_size, scales)):
        found = {key: value for key, value in found.items() if key not in _MSCALES}
        if all(scales) and _is_size(found.get("factor")):
            above, below = (0.1 * scale * log(max(1.0, found["factor"])) + 1 for scale in scales)
            found.setdefault("attention_factor", above / below)
    return found


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and value >= 0


GPT2 = Settings(
    sizes={
        "n_layer": "layers",
        "n_embd": "hidden",
        "n_positions": "sequence",
        "vocab_size": "vocabulary",
        "n_head": "heads",
    },
    fixed={
        "layer_norm_epsilon": LayerNorm.EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    dropouts=("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    others=frozenset(
        {"activation_function", "n_inner", "num_attention_heads", "reorder_and_upcast_attn"}
    ),
    written=_gpt2_written,
    told=_gpt2_told,
)

BERT = Settings(
    sizes={
        "num_hidden_layers": "layers",
        "hidden_size": "hidden",
        "intermediate_size": "ffn",
        "num_attention_heads": "heads",
        "max_position_embeddings": "sequence",
        "vocab_size": "vocabulary",
        "layer_norm_eps": "norm_epsilon",
    },
    fixed={
        "type_vocab_size": 2,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "add_cross_attention": False,
    },
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    others=frozenset(_OF_BERT.split()),
    written=_bert_written,
    told=_bert_told,
)

LLAMA = Settings(
    sizes={
        "num_hidden_layers": "layers",
        "hidden_size": "hidden",
        "intermediate_size": "ffn",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "max_position_embeddings": "sequence",
        "vocab_size": "vocabulary",
        "rms_norm_eps": "norm_epsilon",
        "attention_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
    },
    fixed={"hidden_act": "silu"},
    dropouts=("attention_dropout",),
    others=frozenset({"head_dim", "rope_theta", "rope_scaling", "rope_parameters"}),
    written=_llama_written,
    told=_llama_told,
)

_PLAIN = {key: ours for key, ours in LLAMA.sizes.items() if not key.endswith("_bias")}

PHI3 = LLAMA._replace(
    sizes=_PLAIN,
    fixed={"hidden_act": "silu"},
    dropouts=("resid_pdrop", "embd_pdrop", "attention_dropout"),
    others=LLAMA.others | {_ORIGINAL, "partial_rotary_factor", "sliding_window"},
    written=_phi3_written,
    told=_phi3_told,
    windows=frozenset({"window"}),
)

QWEN2 = LLAMA._replace(
    sizes=_PLAIN,
    fixed={"hidden_act": "silu"},
    others=LLAMA.others
    | {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"},
    written=_qwen2_written,
    told=_qwen2_told,
    windows=frozenset({"window", "global_every"}),
)

MISTRAL = LLAMA._replace(
    sizes=_PLAIN,
    fixed={"hidden_act": "silu"},
    others=LLAMA.others | {"sliding_window"},
    written=_mistral_written,
    told=_mistral_told,
    windows=frozenset({"window"}),
)

MIXTRAL = LLAMA._replace(
    sizes={**_PLAIN, "num_local_experts": "experts", "num_experts_per_tok": "top_k"},
    fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
    others=MISTRAL.others | {_BALANCE, "output_router_logits"},
    written=_mixtral_written,
    told=_mixtral_told,
    windows=frozenset({"window"}),
)

QWEN3 = QWEN2._replace(
    sizes={**_PLAIN, "attention_bias": "attention_bias"},
    told=_qwen3_told,
)

OLMO2 = LLAMA._replace(sizes=QWEN3.sizes, told=_olmo2_told)

GEMMA = LLAMA._replace(
    sizes=QWEN3.sizes,
    fixed={"use_bidirectional_attention": None},
    others=LLAMA.others | {"hidden_act"},
    written=_gemma_written,
    told=_gemma_told,
)

GEMMA2 = GEMMA._replace(
    sizes={**GEMMA.sizes, **_CAPS},
    fixed={**GEMMA.fixed, "hidden_activation": _GELU_OF_GEMMA},
    others=GEMMA.others | set(_OF_GEMMA2.split()),
    written=_gemma2_written,
    told=_gemma2_told,
    windows=frozenset({"window", "global_every"}),
    usual={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
)

GEMMA3 = GEMMA._replace(
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
    },
    others=LLAMA.others | set(_OF_GEMMA3.split()),
    written=_gemma3_written,
    told=_gemma3_told,
    windows=frozenset({"window", "global_every"}),
)

GPT_NEOX = Settings(
    sizes=BERT.sizes,
    fixed={"use_parallel_residual": True, "attention_bias": True, "is_decoder": False},
    dropouts=("attention_dropout", "hidden_dropout"),
    others=frozenset(_OF_NEOX.split()),
    written=_neox_written,
    told=_neox_told,
)

ROBERTA = BERT._replace(
    sizes={key: ours for key, ours in BERT.sizes.items() if ours != "sequence"},
    fixed={**BERT.fixed, "type_vocab_size": 1, "hidden_act": "gelu", "pad_token_id": 1},
    others=BERT.others | {"max_position_embeddings"},
    written=_roberta_written,
    told=_roberta_told,
)

QWEN3_MOE = MIXTRAL._replace(
    sizes={
        **{key: ours for key, ours in QWEN3.sizes.items() if ours != "ffn"},
        "num_experts": "experts",
        "num_local_experts": "experts",
        "num_experts_per_tok": "top_k",
        "moe_intermediate_size": "ffn",
        "decoder_sparse_step": "moe_every",
    },
    fixed={"hidden_act": "silu", "norm_topk_prob": True},
    others=MIXTRAL.others | set(_OF_QWEN3_MOE.split()),
    written=_qwen3_moe_written,
    told=_qwen3_moe_told,
)
