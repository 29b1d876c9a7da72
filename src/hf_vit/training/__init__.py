"""Training as the papers did it: recipes as data, `HfViTTrainer`, `finetune`, the main job, and `pretrain`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
