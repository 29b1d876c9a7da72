"""Images in, batches out: built-in and own data sets, checks before training, transforms and collators."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
