"""The files that travel with a checkpoint: one flat directory, relative sibling imports only."""
