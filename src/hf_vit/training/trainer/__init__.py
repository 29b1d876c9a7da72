"""`HfViTTrainer` and its parts: order, streams, averages, adapters, losses."""
