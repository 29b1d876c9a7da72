"""Holding a model to what is said of it: its published results, measured again."""
