"""Configuration keys of other programs, and their hpc3d equivalents.

The other programs are nanoGPT, Megatron-LM, DeepSpeed, Hugging Face Transformers and torchtitan.
"""

from __future__ import annotations

from collections.abc import Iterable

_ALIKE = {  # hpc3d key -> keys of other programs with the same meaning
    "train.learning_rate": "lr max_lr peak_lr",
    "train.min_learning_rate": "min_lr lr_min eta_min",
    "train.decay": "lr_decay_style lr_scheduler lr_scheduler_type lr_schedule decay_type "
    "lr_wsd_decay_style",
    "train.decay_steps": "lr_decay_iters lr_decay_steps",
    "train.cooldown": "lr_wsd_decay_iters cooldown_steps wsd_decay_steps num_decay_steps",
    "train.warmup": "warmup_iters warmup_steps num_warmup_steps lr_warmup_iters warmup_num_steps",
    "train.steps": "max_iters max_steps train_iters num_train_steps iterations total_steps",
    "train.batch": "global_batch_size train_batch_size train_global_batch_size",
    "train.clip": "grad_clip clip_grad max_grad_norm gradient_clipping max_norm clip_norm",
    "train.beta1": "adam_beta1",
    "train.beta2": "adam_beta2",
    "train.epsilon": "eps adam_eps adam_epsilon",
    "train.optimizer": "optim optimiser optimizer_type",  # codespell:ignore
    "train.weight_decay": "wd",
    "train.dtype": "torch_dtype params_dtype precision mixed_precision",
    "train.tf32": "allow_tf32",
    "train.eval_every": "eval_interval eval_steps",
    "train.eval_batches": "eval_iters",
    "model.layers": "n_layer n_layers num_layers num_hidden_layers num_blocks depth",
    "model.hidden": "n_embd hidden_size d_model n_embed embed_dim embedding_size dim",
    "model.heads": "n_head n_heads num_heads num_attention_heads",
    "model.kv_heads": "n_kv_heads num_key_value_heads num_query_groups n_kv_head",
    "model.head_dim": "kv_channels",
    "model.ffn": "ffn_hidden_size intermediate_size d_ff ffn_dim n_inner",
    "model.sequence": "block_size seq_length seq_len sequence_length context_length n_ctx "
    "n_positions max_position_embeddings max_seq_len context_size",
    "model.vocabulary": "vocab_size padded_vocab_size n_vocab",
    "model.tied": "tie_word_embeddings weight_tying",
    "model.window": "sliding_window window_size attention_window",
    "model.global_every": "sliding_window_pattern",
    "model.rope_window_theta": "rope_local_base_freq",
    "model.query_scalar": "query_pre_attn_scalar",
    "model.score_cap": "attn_logit_softcapping softcap",
    "model.logit_cap": "final_logit_softcapping",
    "model.dropout": "resid_pdrop attn_pdrop embd_pdrop hidden_dropout attention_dropout",
    "model.experts": "num_experts num_local_experts n_experts",
    "model.top_k": "moe_router_topk num_experts_per_tok moe_top_k",
    "model.capacity": "capacity_factor moe_expert_capacity_factor",
    "model.norm_epsilon": "norm_eps rms_norm_eps layernorm_epsilon layer_norm_eps",
    "model.rope_theta": "rotary_base",
    "mesh.p": "pp pipeline_parallel_size pipeline_model_parallel_size pp_size "
    "pipeline_parallel_degree",
    "mesh.d": "dp data_parallel_size dp_size data_parallel_replicate_degree",
    "mesh.c": "cp context_parallel_size cp_size context_parallel_degree",
    "mesh.e": "ep expert_model_parallel_size expert_parallel_size ep_size",
    "parallel.zero": "zero_stage zero_optimization",
    "parallel.shard": "sharding_group_size mics_shard_size zero_hpz_partition_size",
    "parallel.local_steps": "local_sgd_steps diloco_sync_every",
    "parallel.chunks": "virtual_pipeline_model_parallel_size num_model_chunks",
    "parallel.recompute": "activation_checkpointing recompute_granularity gradient_checkpointing "
    "activation_checkpoint recompute_modules",
    "parallel.schedule": "pipeline_parallel_schedule pp_schedule",
    "parallel.overlap": "overlap_grad_reduce overlap_comm",
    "parallel.prefetch": "overlap_param_gather forward_prefetch backward_prefetch",
    "parallel.overlap_experts": "overlap_moe_expert_parallel_comm",
    "parallel.chunked_products": "tp_comm_overlap async_tensor_parallel",
    "parallel.offload": "cpu_offload offload_optimizer offload_param",
    "parallel.attention": "attn_implementation flash_attn use_flash_attn",
    "checkpoint.every": "save_interval save_steps checkpoint_interval",
    "data.boundaries": "reset_attention_mask reset_position_ids document_masking",
    "data.tokenizer": "tokenizer_type tokenizer_name tokenizer_path",
    "data.validation": "val_data eval_dataset valid_data_path validation_file",
    "data.path": "data_path dataset train_data dataset_path train_file dataset_name",
    "run.out": "out_dir output_dir save_dir dump_folder",
    "run.trackers": "tensorboard_dir enable_tensorboard wandb wandb_log wandb_project report_to "
    "enable_wandb",
}
_OTHERWISE = {  # keys of other programs without a direct hpc3d equivalent -> advice
    "tp tensor_model_parallel_size tensor_parallel_size tp_size tensor_parallel_degree": (
        "use mesh.x, mesh.y and mesh.z; their product is the tensor-parallel size"
    ),
    "micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size "
    "local_batch_size": (
        "use train.batch, the global batch size: this value x parallel.microbatches x mesh.d x "
        "mesh.e"
    ),
    "batch_size": (
        "use train.batch, the global batch size in sequences; it equals nanoGPT's batch_size x "
        "gradient_accumulation_steps"
    ),
    "compile torch_compile": (
        "hpc3d does not compile models; train.cuda_graph launches each step as one CUDA graph"
    ),
    "eval_only": (
        "use the command hpc3d evaluate RUN_DIR --data FILE; train.eval_every evaluates the model "
        "during training"
    ),
    "bias": (
        "model.kind decides: gpt2 always has biases, and llama has none unless "
        "model.attention_bias or model.mlp_bias is true"
    ),
    "backend distributed_backend ddp_backend": (
        "remove it, because hpc3d selects NCCL or MPI automatically (mesh.transport); "
        "train.backend selects numpy or cupy arrays"
    ),
    "always_save_checkpoint": (
        "instead of True, set checkpoint.every to the value of train.eval_every; instead of "
        "False, set checkpoint.keep_best = true"
    ),
    "log_interval log_freq logging_steps": (
        "remove it: every step is logged, and sent to the trackers in run.trackers"
    ),
    "wandb_run_name run_name": "use name, the prefix of the folder in run.out",
    "bucket_cap reduce_bucket_size": "use parallel.bucket_mb, in megabytes",
    "min_lr_factor min_lr_ratio": "use train.min_learning_rate, which is an absolute rate",
    "warmup_ratio lr_warmup_fraction": "use train.warmup, in steps",
    "decay_ratio": "use train.cooldown, in steps",
    "decay_lr": 'use train.decay; "constant" disables the decay',
    "betas adam_betas": "use train.beta1 and train.beta2",
    "data_parallel_shard_degree": (
        "use parallel.shard with parallel.zero = 3; mesh.d is the product of both degrees"
    ),
    "pipeline_parallel_microbatch_size": "use parallel.microbatches, the number of microbatches",
    "untie_embeddings_and_output_weights": "use model.tied = false",
    "swiglu": 'use model.kind = "llama"',
    "resume resume_from_checkpoint init_from load load_dir model_name_or_path": (
        "use the option --resume RUN_DIR, with a run that has checkpoints (checkpoint.every); "
        "to start from a Hugging Face model, first run hpc3d checkpoint import"
    ),
    "gradient_accumulation_steps grad_accum_steps num_microbatches": (
        "use parallel.microbatches; the global batch, train.batch, is split into microbatches"
    ),
    "epochs num_epochs num_train_epochs": (
        "use train.steps; each step processes train.batch sequences"
    ),
    "fp16": 'use train.dtype = "float16"',
    "bf16": 'use train.dtype = "bfloat16"',
    "fp8": 'use train.product_dtype = "float8"',
    "sequence_parallel": 'use parallel.scheme = "1d-sequence"',
    "ranks world_size nproc_per_node num_gpus": (
        "use --launch N or mpirun -np N, or --dry-run --ranks N; N is the product of the sizes "
        "mesh.p to mesh.z"
    ),
    "machine": (
        "only --dry-run, simulate and plan accept a machine; training uses the local machine, on "
        "CPUs or GPUs (train.backend)"
    ),
    "device": 'use train.backend = "numpy" or "cupy"',
    "fsdp": "use parallel.zero = 3",
    "deepspeed deepspeed_config": (
        "use the keys of hpc3d instead of a DeepSpeed configuration, such as parallel.zero for "
        "the ZeRO stage"
    ),
}
_OF_GENERATION = {  # options of other programs that generate text -> advice
    "max_new_tokens max_tokens max_length": "use --tokens",
    "num_return_sequences num_samples n_samples": "use --samples",
    "top_k": "use --top-k",
    "top_p": "use --top-p",
    "do_sample greedy": "tokens are sampled; use --temperature 0 for greedy decoding",
    "start text": "use --prompt",
    "init_from out_dir load model model_name_or_path": (
        "give the run or the model as the first argument, RUN_DIR or FOLDER"
    ),
}


_ADVICE = {names: f"use {key}" for key, names in _ALIKE.items()} | _OTHERWISE
FAMILIAR, _GENERATION = (
    {name: advice for names, advice in table.items() for name in names.split()}
    for table in (_ADVICE, _OF_GENERATION)
)
"""Dicts from a key of another program, in lower case with underscores, to advice."""


def foreign_options(words: Iterable[str]) -> list[str]:
    """Return an error message for each option of another program in the arguments of `generate`.

    Only the spelling of hpc3d, such as --top-k, is accepted.
    """
    names = [word.partition("=")[0] for word in words if word.startswith("--")]
    advice = [(name, _GENERATION.get(name[2:].lower().replace("-", "_"))) for name in names]
    return [
        f"{name}: unknown option; {said}"
        for name, said in advice
        if said and said != f"use {name}"
    ]


def familiar(name: str) -> str | None:
    """Return advice on the hpc3d equivalent of another program's key, or None if it is unknown."""
    return FAMILIAR.get(name.lower().replace("-", "_"))
