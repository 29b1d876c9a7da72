"""`HfViTTrainer` and its parts: order of the data, streams, EMA, LoRA, losses."""
