"""Analyses from the papers that show how a model processes images; submodules are imported when first used."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
