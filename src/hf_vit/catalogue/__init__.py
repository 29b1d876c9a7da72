"""List models with their sizes, FLOPs and published results, as a table, JSON or an HTML page."""
