"""The command line: one thin module a command. Parses, calls the package, reports.

It stands beside `hf_vit`, whose import registers with transformers and takes seconds: no module here imports it before
a command runs, so that help, version and completion are there at once.
"""
