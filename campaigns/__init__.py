"""Campaigns: what takes hours to try. Each is one module, run by `python -m campaigns NAME`."""

# `tests/test_campaigns.py` runs three cases of each.
NAMES = (
    "bad_inputs", "forged", "hostile", "kills", "lost_processes", "preprocessing_in_graphs", "ray_faults",
    "silent_numbers", "timm_sweep",
)  # fmt: skip
