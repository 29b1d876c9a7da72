"""Checkpoints of Google's codes: .npz of vit_jax, big_vision and big_transfer."""
