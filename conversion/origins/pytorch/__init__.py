"""Checkpoints of timm, and of training codes whose encoders have timm's names or names of their own."""
