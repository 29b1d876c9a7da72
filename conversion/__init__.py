"""Convert checkpoints of other libraries into hf_vit models and export models to other formats (see README.md).

Names are imported on first use, so that a conversion does not import the export code.
"""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
