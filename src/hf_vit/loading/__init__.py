"""The one way to a model of any library: `load_model(name)`, its pixels and features, and where a training starts."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
