"""Module to module without a change of the function: fewer, larger products, and nothing frozen is computed twice.

`looking` refuses beforehand what would be lost; `planning` says what stands for what, and changes nothing by itself.
"""
