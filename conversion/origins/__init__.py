"""The codes that checkpoints come from: one module an origin, its key table as data."""
