"""Masks and objects: how they are stored and checked, where they are read from, transforms and tiles."""
