"""What a model and its training cost: FLOPs from the configuration alone, time, money; and what error they buy."""

from hf_vit.conversion.loading import find_config
from hf_vit.cost.blog import BlogEstimate, CorrectedEstimate, Correction, blog_estimate, corrected_estimate
from hf_vit.cost.device import matmul_flops_per_second
from hf_vit.cost.estimate import CostEstimate, estimate
from hf_vit.cost.flops import forward_flops, forward_macs, training_flops
from hf_vit.cost.memory import DeviceMemory, MemoryPlan, memory_plan
from hf_vit.cost.points import read_points
from hf_vit.cost.runs import MeasuredRun, measured_run
from hf_vit.cost.scaling_law import ScalingLaw, fit_scaling_law, plot_scaling_law
from hf_vit.cost.summary import CostSummary, cost_summary
from hf_vit.cost.tpu import BesideTpu, beside_tpu

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
