"""What a model is measured by: one module a protocol, all of them in the table of `registry.py`."""
