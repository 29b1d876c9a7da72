"""Write a static page that runs a model in the visitor's browser; its scripts in `static/` are built from `page/`."""
