"""Small versions of public models of Hugging Face transformers.

Each model is an unmodified class of transformers, with random weights in float64 and a batch of
eight samples. A configuration sets sizes only, unless a comment gives a reason.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

HERE = "tests.peers.public_models"
BATCH, LENGTH, WORDS, CLASSES = 8, 6, 40, 5

Inputs = dict[str, torch.Tensor]


class PublicModel(NamedTuple):
    """Class `kind` of transformers, with the settings of its configuration and example inputs."""

    kind: str
    settings: dict[str, Any]
    inputs: Callable[[], Inputs]


def model(name: str) -> tuple[torch.nn.Module, Inputs]:
    """Create a public model and its inputs, as a factory for `hpc3d.partition`."""
    made = MODELS[name]
    kind = getattr(transformers, made.kind)
    return kind(kind.config_class(**made.settings)).double(), made.inputs()


def factory_of(name: str) -> str:
    """Return the `MODULE:FACTORY` of a public model."""
    return f"{HERE}:model('{name}')"


# Inputs. The lengths of the rows differ: padding has the label -100 and no attention.


def _lengths(length=LENGTH):
    """Return decreasing row lengths, so that microbatches have different numbers of targets."""
    return length - torch.arange(BATCH) * (length - 2) // (BATCH - 1)


def _attended(length=LENGTH):
    return (torch.arange(length) < _lengths(length)[:, None]).long()


def _ids(length=LENGTH):
    return torch.randint(4, WORDS, (BATCH, length))  # without special tokens


def _padded(labels):
    return labels.masked_fill(_attended(labels.shape[1]) == 0, -100)


def causal() -> Inputs:
    ids = _ids()
    return {"input_ids": ids, "attention_mask": _attended(), "labels": _padded(ids)}


def unpadded() -> Inputs:
    ids = _ids()
    return {"input_ids": ids, "labels": ids.clone()}


def masked() -> Inputs:
    """Return masked-language-model inputs: one target per sample, or two if the row is long."""
    ids, columns = _ids(), torch.arange(LENGTH)
    targets = (columns == 1) | (columns == _lengths()[:, None] - 1)
    labels = ids.masked_fill(~targets, -100)
    return {
        "input_ids": ids.masked_fill(targets, 3),
        "attention_mask": _attended(),
        "labels": labels,
    }


def pretraining() -> Inputs:
    return masked() | {
        "token_type_ids": (torch.arange(LENGTH) > 2).long().expand(BATCH, LENGTH).clone(),
        "next_sentence_label": torch.randint(0, 2, (BATCH,)),
    }


def ordered_sentences() -> Inputs:
    given = pretraining()
    return given | {"sentence_order_label": given.pop("next_sentence_label")}


def text_classes() -> Inputs:
    labels = torch.randint(0, CLASSES, (BATCH,))
    return {"input_ids": _ids(), "attention_mask": _attended(), "labels": labels}


def token_classes() -> Inputs:
    labels = _padded(torch.randint(0, CLASSES, (BATCH, LENGTH)))
    return {"input_ids": _ids(), "attention_mask": _attended(), "labels": labels}


def replaced_tokens() -> Inputs:
    labels = torch.randint(0, 2, (BATCH, LENGTH))
    return {"input_ids": _ids(), "attention_mask": _attended(), "labels": labels}


def answers() -> Inputs:
    first = torch.randint(0, 2, (BATCH,))
    return {
        "input_ids": _ids(),
        "attention_mask": _attended(),
        "start_positions": first,
        "end_positions": first + 1,
    }


def translated() -> Inputs:
    return {
        "input_ids": _ids(),
        "attention_mask": _attended(),
        "labels": _padded(_ids(LENGTH - 1)),
    }


def _image(size):
    return torch.randn(BATCH, 3, size, size, dtype=torch.float64)


def image_classes(size=16) -> Inputs:
    return {"pixel_values": _image(size), "labels": torch.randint(0, CLASSES, (BATCH,))}


def larger_images() -> Inputs:
    return image_classes(32)


def largest_images() -> Inputs:
    return image_classes(64)


def pixel_classes() -> Inputs:
    labels = torch.randint(0, CLASSES, (BATCH, 32, 32))
    labels[:, :3] = 255  # ignored
    return {"pixel_values": _image(32), "labels": labels}


def images_with_noise() -> Inputs:
    return {"pixel_values": _image(16), "noise": torch.rand(BATCH, 16, dtype=torch.float64)}


def pairs() -> Inputs:
    return {
        "input_ids": torch.cat([_ids(LENGTH - 1), torch.full((BATCH, 1), WORDS - 1)], 1),
        "pixel_values": _image(16),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "return_loss": True,
    }


def transcribed() -> Inputs:
    waves = torch.randn(BATCH, 400, dtype=torch.float64)
    return {"input_values": waves, "labels": _padded(torch.randint(1, WORDS, (BATCH, 4)))}


def spoken_classes() -> Inputs:
    waves = torch.randn(BATCH, 400, dtype=torch.float64)
    return {"input_values": waves, "labels": torch.randint(0, CLASSES, (BATCH,))}


def spectra() -> Inputs:
    features = torch.randn(BATCH, 8, 16, dtype=torch.float64)
    return {"input_features": features, "labels": _padded(_ids(LENGTH))}


def spectrogram_classes() -> Inputs:
    values = torch.randn(BATCH, 16, 16, dtype=torch.float64)
    return {"input_values": values, "labels": torch.randint(0, CLASSES, (BATCH,))}


def series() -> Inputs:
    return {
        "past_values": torch.randn(BATCH, 16, 2, dtype=torch.float64),
        "future_values": torch.randn(BATCH, 4, 2, dtype=torch.float64),
    }


def timed_series() -> Inputs:
    past, future = 16 + 3, 4
    return {
        "past_values": torch.randn(BATCH, past, dtype=torch.float64),
        "past_time_features": torch.randn(BATCH, past, 2, dtype=torch.float64),
        "past_observed_mask": torch.ones(BATCH, past, dtype=torch.float64),
        "future_values": torch.randn(BATCH, future, dtype=torch.float64),
        "future_time_features": torch.randn(BATCH, future, 2, dtype=torch.float64),
    }


# Sizes.

GPT = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": WORDS}
BODY = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
}
TOKENS = {"vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 0}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
BERT = {**BODY, **TOKENS}
DEEP = {"num_hidden_layers": 2}
CLASSED = {"num_labels": CLASSES}
LLAMA = {**BERT, **ENDS, "num_key_value_heads": 1}
BART = {
    **TOKENS,
    **ENDS,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": WORDS,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
VIT = {**BODY, "image_size": 16, "patch_size": 4, **CLASSED}
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [1, 2],
    "window_size": 4,
    **CLASSED,
}
CONVNEXT = {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], **CLASSED}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], **CLASSED}
SPEECH = {
    **BODY,
    "vocab_size": WORDS,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "pad_token_id": 0,
}
SERIES = {
    "prediction_length": 4,
    "context_length": 16,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}


MODELS = {
    # language models
    "gpt2": PublicModel("GPT2LMHeadModel", {**GPT, **ENDS}, causal),
    "gpt_neo": PublicModel(
        "GPTNeoForCausalLM",
        {
            **TOKENS,
            **ENDS,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        causal,
    ),
    "gpt_neox": PublicModel("GPTNeoXForCausalLM", {**BERT, **ENDS}, causal),
    "opt": PublicModel(
        "OPTForCausalLM",
        {**BERT, **ENDS, "ffn_dim": 24, "word_embed_proj_dim": 16},
        causal,
    ),
    "bloom": PublicModel(
        "BloomForCausalLM",
        {"vocab_size": WORDS, "hidden_size": 16, "n_layer": 1, "n_head": 2, **ENDS},
        causal,
    ),
    "llama": PublicModel("LlamaForCausalLM", {**LLAMA, **DEEP}, causal),
    "mistral": PublicModel("MistralForCausalLM", {**LLAMA, "sliding_window": 4}, causal),
    "mixtral": PublicModel(
        "MixtralForCausalLM",
        {
            **LLAMA,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "experts_implementation": "eager",  # the default has no float64
        },
        causal,
    ),
    "qwen2": PublicModel("Qwen2ForCausalLM", LLAMA, causal),
    "qwen3": PublicModel("Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}, causal),
    "gemma": PublicModel("GemmaForCausalLM", {**LLAMA, "head_dim": 8}, causal),
    "gemma2": PublicModel(
        "Gemma2ForCausalLM", {**LLAMA, **DEEP, "head_dim": 8, "sliding_window": 4}, unpadded
    ),
    "phi": PublicModel("PhiForCausalLM", {**BERT, **ENDS}, causal),
    "phi3": PublicModel("Phi3ForCausalLM", LLAMA, causal),
    "falcon": PublicModel(
        "FalconForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            **ENDS,
        },
        causal,
    ),
    "stablelm": PublicModel("StableLmForCausalLM", LLAMA, causal),
    "olmo": PublicModel("OlmoForCausalLM", LLAMA, causal),
    "olmo2": PublicModel("Olmo2ForCausalLM", LLAMA, causal),
    "granite": PublicModel("GraniteForCausalLM", LLAMA, unpadded),
    "cohere": PublicModel("CohereForCausalLM", LLAMA, causal),
    "starcoder2": PublicModel("Starcoder2ForCausalLM", LLAMA, causal),
    "mamba": PublicModel(
        "MambaForCausalLM",
        {
            "vocab_size": WORDS,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "state_size": 4,
            **ENDS,
            "pad_token_id": 0,
        },
        unpadded,
    ),
    # encoders
    "bert_pretraining": PublicModel("BertForPreTraining", {**BERT, **DEEP}, pretraining),
    "bert_masked": PublicModel("BertForMaskedLM", BERT, masked),
    "bert_classes": PublicModel(
        "BertForSequenceClassification", {**BERT, **CLASSED}, text_classes
    ),
    "bert_tokens": PublicModel("BertForTokenClassification", {**BERT, **CLASSED}, token_classes),
    "bert_answers": PublicModel("BertForQuestionAnswering", BERT, answers),
    "roberta": PublicModel("RobertaForMaskedLM", BERT, masked),
    "distilbert": PublicModel(
        "DistilBertForSequenceClassification",
        {**TOKENS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, **CLASSED},
        text_classes,
    ),
    "albert": PublicModel(
        "AlbertForPreTraining", {**BERT, **DEEP, "embedding_size": 8}, ordered_sentences
    ),
    "electra": PublicModel(
        "ElectraForPreTraining", {**BERT, "embedding_size": 8}, replaced_tokens
    ),
    "electra_masked": PublicModel("ElectraForMaskedLM", {**BERT, "embedding_size": 8}, masked),
    "deberta_v2": PublicModel(
        "DebertaV2ForMaskedLM",
        {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
        masked,
    ),
    "mpnet": PublicModel("MPNetForMaskedLM", BERT, masked),
    "modernbert": PublicModel("ModernBertForMaskedLM", {**BERT, **DEEP}, masked),
    "longformer": PublicModel(
        "LongformerForMaskedLM",
        {**BERT, **ENDS, "attention_window": 4},
        masked,
    ),
    # encoders with decoders
    "t5": PublicModel("T5ForConditionalGeneration", T5, translated),
    "bart": PublicModel("BartForConditionalGeneration", BART, translated),
    "mbart": PublicModel("MBartForConditionalGeneration", BART, translated),
    "pegasus": PublicModel("PegasusForConditionalGeneration", BART, translated),
    "marian": PublicModel("MarianMTModel", BART, translated),
    "blenderbot": PublicModel("BlenderbotForConditionalGeneration", BART, translated),
    # images
    "vit": PublicModel("ViTForImageClassification", {**VIT, **DEEP}, image_classes),
    "deit": PublicModel("DeiTForImageClassification", VIT, image_classes),
    "beit": PublicModel("BeitForImageClassification", VIT, image_classes),
    "swin": PublicModel("SwinForImageClassification", SWIN, larger_images),
    "swinv2": PublicModel("Swinv2ForImageClassification", SWIN, larger_images),
    "convnext": PublicModel("ConvNextForImageClassification", CONVNEXT, larger_images),
    "convnextv2": PublicModel("ConvNextV2ForImageClassification", CONVNEXT, larger_images),
    "resnet": PublicModel(
        "ResNetForImageClassification", {**RESNET, "layer_type": "basic"}, image_classes
    ),
    "regnet": PublicModel(
        "RegNetForImageClassification", {**RESNET, "groups_width": 4}, image_classes
    ),
    "segformer": PublicModel(
        "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [8, 16],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16,
            **CLASSED,
        },
        pixel_classes,
    ),
    "dinov2": PublicModel("Dinov2ForImageClassification", VIT, image_classes),
    "vit_mae": PublicModel(
        "ViTMAEForPreTraining",
        {
            **BODY,
            "image_size": 16,
            "patch_size": 4,
            "decoder_hidden_size": 16,
            "decoder_intermediate_size": 24,
            "decoder_num_attention_heads": 2,
            "decoder_num_hidden_layers": 1,
        },
        images_with_noise,
    ),
    "levit": PublicModel(
        "LevitForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [8, 12, 16],
            "num_attention_heads": [1, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [4, 4, 4],
            "down_ops": [["Subsample", 4, 2, 4, 2, 2], ["Subsample", 4, 3, 4, 2, 2]],
            **CLASSED,
        },
        largest_images,
    ),
    "poolformer": PublicModel(
        "PoolFormerForImageClassification",
        {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], **CLASSED},
        larger_images,
    ),
    "clip": PublicModel(
        "CLIPModel",
        {
            "text_config": {**BERT, "bos_token_id": 1, "eos_token_id": WORDS - 1},
            "vision_config": {**BODY, "image_size": 16, "patch_size": 4},
            "projection_dim": 16,
        },
        pairs,
    ),
    "clip_images": PublicModel(
        "CLIPForImageClassification",
        {"vision_config": {**BODY, "image_size": 16, "patch_size": 4}, **CLASSED},
        image_classes,
    ),
    # sound
    "wav2vec2": PublicModel("Wav2Vec2ForCTC", SPEECH, transcribed),
    "wav2vec2_classes": PublicModel(
        "Wav2Vec2ForSequenceClassification",
        {**SPEECH, "classifier_proj_size": 8, **CLASSED},
        spoken_classes,
    ),
    "wav2vec2_all_layers": PublicModel(  # without LayerDrop and SpecAugment
        "Wav2Vec2ForSequenceClassification",
        {
            **SPEECH,
            "classifier_proj_size": 8,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            **CLASSED,
        },
        spoken_classes,
    ),
    "whisper": PublicModel(
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 8,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        spectra,
    ),
    "ast": PublicModel(
        "ASTForAudioClassification",
        {
            **BODY,
            "patch_size": 4,
            "num_mel_bins": 16,
            "max_length": 16,
            "frequency_stride": 4,
            "time_stride": 4,
            **CLASSED,
        },
        spectrogram_classes,
    ),
    # time series
    "patchtst": PublicModel(
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 16,
            "prediction_length": 4,
            "patch_length": 4,
            "patch_stride": 4,
            "d_model": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 16,
            "loss": "mse",
        },
        series,
    ),
    "informer": PublicModel("InformerForPrediction", SERIES, timed_series),
    "time_series_all_layers": PublicModel(  # without LayerDrop
        "TimeSeriesTransformerForPrediction",
        {**SERIES, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        timed_series,
    ),
}
