"""Checkpoints of transformers: config.json tells what the weights do not."""
