"""The stock `transformers.Trainer` trains an hf_vit model, without `hf_vit.training`.

    python examples/stock_trainer.py [--steps 300] [--output DIR]

A small ViT learns the 1,797 handwritten digits that scikit-learn ships; 300 steps take about 20 seconds on one core.
After so few steps the accuracy differs by several points from seed to seed.
"""

import argparse
import tempfile

import numpy as np
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from hf_vit import HfViTConfig
from hf_vit.data import AugmentationConfig, ImageCollator, image_transforms, load_data, make_processor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", help="folder for the trained model; by default a temporary one")
    arguments = parser.parse_args()

    data = load_data("digits")
    names = data.label_names
    config = HfViTConfig(
        image_size=8,
        patch_size=2,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        pooling="gap",
        position_embedding="sincos_2d",
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
    )
    processor = make_processor(config)
    varied, plain = image_transforms(processor, AugmentationConfig(rotation_degrees=5))
    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=AutoModelForImageClassification.from_config(config),
            args=TrainingArguments(
                output_dir=arguments.output or scratch,
                max_steps=arguments.steps,
                per_device_train_batch_size=64,
                learning_rate=2e-3,
                warmup_steps=0.1,
                lr_scheduler_type="cosine",
                remove_unused_columns=False,  # the transforms need the image column
                dataloader_pin_memory=False,
                save_strategy="no",
                report_to="none",
            ),
            train_dataset=data.splits["train"].with_transform(varied),
            eval_dataset=data.splits["validation"].with_transform(plain),
            data_collator=ImageCollator(len(names)),
            processing_class=processor,
            compute_metrics=lambda prediction: {
                "accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))
            },
        )
        trainer.train()
        print(f"validation accuracy {trainer.evaluate()['eval_accuracy']:.2%}")
        if arguments.output:
            trainer.save_model()
            print(f"saved in {arguments.output}")


if __name__ == "__main__":
    main()
