"""Training data: texts, tokenizers, token files and batches."""
