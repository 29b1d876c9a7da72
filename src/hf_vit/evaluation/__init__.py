"""Evaluate models and predict images; modules are imported when they are used."""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
