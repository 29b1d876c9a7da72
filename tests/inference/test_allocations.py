"""What the memory of activations costs: a process that optimized a model does not fetch it anew in every pass."""

import platform
import subprocess
import sys

import pytest

COUNTING = """
import resource, sys
import torch
import hf_vit

if sys.argv[1] == "optimized":
    config = hf_vit.HfViTConfig(image_size=16, patch_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    hf_vit.optimize_for_inference(hf_vit.HfViTModel(config), engine="torch")
torch.ones(3_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(5_000_000)
    torch.ones(3_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_activations_are_not_given_back_to_the_system():
    """20 MB, then 12 MB, twenty times: pages of 4 kB fetched from the system."""
    faults = {
        name: int(subprocess.run([sys.executable, "-c", COUNTING, name], capture_output=True, check=True).stdout)
        for name in ("plain", "optimized")
    }
    assert faults["optimized"] < 8000, "each of the two blocks once, at most"
    assert faults["plain"] > 2 * faults["optimized"], "glibc keeps it by itself: the block that teaches it is of no use"
