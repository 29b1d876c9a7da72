from .blog import BesideTpu, BlogEstimate, CorrectedEstimate, Correction, beside_tpu, blog_estimate, corrected_estimate
from .flops import forward_flops, forward_macs, training_flops
from .memory import DeviceMemory, MemoryPlan, memory_plan
from .scaling_law import ScalingLaw, fit_scaling_law, plot_scaling_law, read_points
from .trainings import (
    CostEstimate,
    CostSummary,
    MeasuredRun,
    cost_summary,
    estimate,
    find_config,
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
