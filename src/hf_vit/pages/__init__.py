"""A static page that runs a model in the visitor's browser; its scripts are built from `page/` into `static/`."""
