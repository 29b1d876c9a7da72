"""Load models of any library with `load_model(name)`, prepare their images, read their features, and start training."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
