"""A plan carried out: the weights, and the model and processor that they make."""
