"""Inference with trained models: text generation and evaluation."""
