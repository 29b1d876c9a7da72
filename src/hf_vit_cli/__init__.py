"""The command line: one thin module per command, which parses options, calls the package and reports.

It is separate from `hf_vit`, whose import takes seconds. No module here imports `hf_vit` before a command runs, so that
help, version and completion appear at once.
"""
