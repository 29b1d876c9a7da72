"""Train models as in the papers: `finetune`, `pretrain`, `HfViTTrainer`, and recipes as data."""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
