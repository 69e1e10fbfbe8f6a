"""A trained model continues a text."""
