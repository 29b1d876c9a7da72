"""Images in, batches out: built-in and own data sets, checks before training, transforms and collators."""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
