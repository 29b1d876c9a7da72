"""Original checkpoints into hf_vit models, and out again: key tables as data, one engine (README.md).

Nothing is imported before it is used: who converts needs no export.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
