"""Train models as in the papers: `finetune`, `pretrain`, `HfViTTrainer`, and recipes as data."""

from hf_vit.environment import make_lazy_names

__getattr__, __dir__, __all__ = make_lazy_names(__name__, __file__)
