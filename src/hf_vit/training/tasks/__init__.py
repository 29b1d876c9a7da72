"""Tasks of a training: classification, distillation, self-training, dense prediction and pre-training objectives."""
