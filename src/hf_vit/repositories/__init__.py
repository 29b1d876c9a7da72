"""Read from the Hub and from object stores: download, check what was downloaded, and explain failures."""
