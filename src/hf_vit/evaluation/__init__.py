"""Evaluate models and predict images; modules are imported when they are used."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
