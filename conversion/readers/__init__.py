"""Reading checkpoint files of unknown origin: one module a format."""
