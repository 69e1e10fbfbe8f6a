"""Text, tokenizers, tokens and batches."""
