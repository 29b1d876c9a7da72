"""A run from its checks to its finished folder: preparing, running, resuming, completing."""
