"""Checkpoints from addresses to local files."""
