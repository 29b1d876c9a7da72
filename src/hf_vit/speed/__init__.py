"""Measuring hf_vit beside its peers on identical shapes: contestants and cells of a table (`peers`)."""
