"""hf_vit: the original Vision Transformer and its variants as first-class transformers models.

Importing the package registers its families with transformers' Auto classes. Public names are imported when used.
"""

import logging
import sys

# Where torchao is installed, transformers imports it, and torch complains of it (torchao 0.18 with torch 2.13).
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in record.msg)

from hf_vit.environment import make_lazy_names  # noqa: E402

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)

# `python -m hf_vit` imports this before the program, whose help needs no library; its commands register themselves.
# argv[0] is "-m" also while the package of another module that runs so is imported.
if sys.argv[:1] != ["-m"] or sys.orig_argv[-len(sys.argv)] != "hf_vit":
    from hf_vit.families import register

    register()
