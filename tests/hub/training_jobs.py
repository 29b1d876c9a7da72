"""A tiny training in a client process."""

from typing import Any


def train(
    folder: str,
    hub_model_id: str,
    named: bool = True,
    processor: bool = True,
    catch: bool = True,
    stock: bool = False,
    license: str | None = "mit",
) -> dict[str, Any]:
    """Two steps of `HfViTTrainer(push_to_hub=True)`, or of transformers' own, on images of noise."""
    import torch
    from evaluation.tiny import make_processor
    from hub.jobs import logits
    from transformers import Trainer, TrainingArguments

    from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
    from hf_vit.results.facts import DataFact
    from hf_vit.training import HfViTTrainer

    torch.manual_seed(0)
    config = HfViTConfig(image_size=(8, 12), patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                         intermediate_size=16, num_labels=2)  # fmt: skip
    images = [{"pixel_values": torch.randn(3, 8, 12), "labels": index % 2} for index in range(6)]
    arguments = TrainingArguments(
        folder, push_to_hub=True, hub_model_id=hub_model_id, max_steps=2, save_steps=2, eval_strategy="steps",
        eval_steps=2, per_device_train_batch_size=3, learning_rate=1e-3, use_cpu=True, report_to="none",
    )  # fmt: skip
    parts: dict[str, Any] = {
        "model": HfViTForImageClassification(config),
        "args": arguments,
        "train_dataset": images,
        "eval_dataset": images,
        "processing_class": make_processor() if processor else None,
        "compute_metrics": lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    }
    trainer = None
    try:
        if stock:
            trainer = Trainer(**parts)
        else:
            fact = DataFact(name="colours", split="train", size=6) if named else None
            trainer = HfViTTrainer(**parts, data_fact=fact, license=license)
        trainer.train()
    except UserError as error:
        if not catch:
            raise
        return {"error": str(error), "steps": 0 if trainer is None else trainer.state.global_step}
    from huggingface_hub import HfApi

    return {"commit": HfApi().model_info(hub_model_id).sha, "logits": logits(folder)}
