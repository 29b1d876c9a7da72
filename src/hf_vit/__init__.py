"""hf_vit."""
