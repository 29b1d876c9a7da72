"""Check models against their published results, and compare two models."""
