"""The one place for speed: a frozen model rewritten, packed for the processor, or compiled; `optimize` is its door."""
