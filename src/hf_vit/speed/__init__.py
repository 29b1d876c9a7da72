"""Measuring hf_vit beside its peers on identical shapes: contestants (`peers`), cells of a table (`cells`)."""
