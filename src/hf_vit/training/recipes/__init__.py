"""Recipes: complete sets of training settings as data, each with its source."""
