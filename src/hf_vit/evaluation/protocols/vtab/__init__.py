"""VTAB-1k: the table of its 19 tasks, how each is read from a local copy, and what is measured on them."""
