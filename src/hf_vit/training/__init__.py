"""Training as the papers did it: recipes as data, `HfViTTrainer`, `finetune`, the main job, and `pretrain`."""

from hf_vit.environment import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
