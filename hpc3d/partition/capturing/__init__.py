"""Workarounds that let torch.export trace modules that it does not support directly."""
