"""Predictions for every pixel or object: how they are judged, by torchmetrics, and drawn beside the truth."""
