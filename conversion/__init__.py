"""Original checkpoints into hf_vit models, and out again: key tables as data, one engine (README.md).

Nothing is imported before it is used: who converts needs no export.
"""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
