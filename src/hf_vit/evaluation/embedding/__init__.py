"""Embeddings or predictions of a whole data set: the job, and the processes that do it."""
