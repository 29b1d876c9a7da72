"""Estimate the cost of models and trainings: FLOPs, memory, time and money, and scaling laws of the error."""

from hf_vit.conversion.loading import find_config
from hf_vit.cost.blog import (
    BesideTpu,
    BlogEstimate,
    CorrectedEstimate,
    Correction,
    beside_tpu,
    blog_estimate,
    corrected_estimate,
)
from hf_vit.cost.flops import forward_flops, forward_macs, training_flops
from hf_vit.cost.memory import DeviceMemory, MemoryPlan, memory_plan
from hf_vit.cost.scaling_law import ScalingLaw, fit_scaling_law, plot_scaling_law, read_points
from hf_vit.cost.trainings import (
    CostEstimate,
    CostSummary,
    MeasuredRun,
    cost_summary,
    estimate,
    matmul_flops_per_second,
    measured_run,
)

__all__ = [
    "BesideTpu",
    "BlogEstimate",
    "CorrectedEstimate",
    "Correction",
    "CostEstimate",
    "CostSummary",
    "DeviceMemory",
    "MeasuredRun",
    "MemoryPlan",
    "ScalingLaw",
    "beside_tpu",
    "blog_estimate",
    "corrected_estimate",
    "cost_summary",
    "estimate",
    "find_config",
    "fit_scaling_law",
    "forward_flops",
    "forward_macs",
    "matmul_flops_per_second",
    "measured_run",
    "memory_plan",
    "plot_scaling_law",
    "read_points",
    "training_flops",
]
