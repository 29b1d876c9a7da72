"""Built-in data: real images that come with installed libraries, and synthetic ones made from a formula."""
