"""How images, activations and attention maps are read from any vision transformer."""
