"""hf_vit: the original Vision Transformer and its variants as first-class transformers models.

Importing the package registers its families with transformers' Auto classes. Public names are imported when used.
"""

import lazy_loader

from hf_vit.families import register

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

register()
