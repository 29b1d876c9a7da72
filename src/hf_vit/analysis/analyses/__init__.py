"""The analyses: one class and one line of the table in `registry.py` each."""
