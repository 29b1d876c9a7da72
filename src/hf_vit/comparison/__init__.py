"""Comparison of image classifiers of any library. Nothing is imported before it is used."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
