"""The one way to a model of any library: `load_model(name)`, its pixels and features, and where a training starts."""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
