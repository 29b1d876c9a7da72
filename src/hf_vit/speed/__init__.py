"""Measure the speed of hf_vit and of its peers on identical shapes."""
