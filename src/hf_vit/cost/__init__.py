"""Estimate the cost of models and trainings: FLOPs, memory, time and money, and scaling laws of the error."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
