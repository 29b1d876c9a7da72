"""AxialResNet's attention beside the einsum over pairs of places, at the spans of its stages.

    python benchmarks/axial_resnet.py [--turns 5] [--threads N] [--output benchmarks/results/axial_resnet.json]

All compute the same layer on the same weights (AxialResNet-L by default): projections, batch norms, logits
q.k + q.r^q + k.r^k, softmax, values + r^v. Two formulations stand against ours: "einsum" over all pairs of places at
once, where the tables are gathered to [L, L, K] and each term of the logits is written out, normed and summed; and
"einsum a position", which takes one query position after the other with the rows of the tables that it sees (in
evaluation alone: batch statistics would need all positions). Then whole networks: hf_vit's, and the same one with an
einsum in every attention. Training rows are a forward and a backward pass. A row names the largest difference of the
outputs.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from hf_vit.models.configuration_hf_axial_resnet import HEADS, HfAxialResNetConfig
from hf_vit.models.modeling_hf_axial_resnet import (
    HfAxialResNetAttention,
    HfAxialResNetBottleneck,
    HfAxialResNetModel,
    LogitNorm,
)
from hf_vit.speed.measuring import quartiles, speed_ratio, take_turns
from hf_vit.speed.script import Script, parser

SPANS = {56: 1, 28: 2, 14: 4}  # places of a line -> multiple of the first stage's width


Core: TypeAlias = Callable[[torch.Tensor, torch.Tensor, LogitNorm], tuple[torch.Tensor, torch.Tensor]]


def over_pairs(lines: torch.Tensor, table: torch.Tensor, norm: LogitNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries read from values and from positions, [M, L, A*V] both, of q, k and v [M, A, L, 2K + V]."""
    length, size = lines.shape[2], lines.shape[3] // 4
    q, k, v = lines.transpose(2, 3).split([size, size, 2 * size], dim=2)
    place = torch.arange(length)
    r_q, r_k, r_v = table[place - place[:, None] + length - 1].split([size, size, 2 * size], dim=2)
    terms = [torch.einsum("maci,macj->maij", q, k), torch.einsum("maci,ijc->maij", q, r_q)]
    terms.append(torch.einsum("macj,ijc->maij", k, r_k))
    mean = None if norm.training else norm.running_var.new_zeros(3 * HEADS)
    variance = None if norm.training else norm.running_var.flatten()
    logits = F.batch_norm(
        torch.cat(terms, dim=1), mean, variance, norm.weight.flatten(), training=norm.training, eps=norm.eps
    )
    probabilities = logits.unflatten(1, (3, HEADS)).sum(1).softmax(dim=-1)
    content = torch.einsum("maij,macj->miac", probabilities, v)
    position = torch.einsum("maij,ijc->miac", probabilities, r_v)
    return content.flatten(2), position.flatten(2)


def a_position(lines: torch.Tensor, table: torch.Tensor, norm: LogitNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, one query position after the other; evaluation."""
    length, size = lines.shape[2], lines.shape[3] // 4
    q, k, v = lines.split([size, size, 2 * size], dim=3)
    scales = (norm.weight * torch.rsqrt(norm.running_var + norm.eps))[..., None]
    found = []
    for i in range(length):
        r_q, r_k, r_v = table[length - 1 - i : 2 * length - 1 - i].split([size, size, 2 * size], dim=1)
        logits = scales[0] * torch.einsum("mac,majc->maj", q[:, :, i], k)
        logits += scales[1] * torch.einsum("mac,jc->maj", q[:, :, i], r_q)
        logits += scales[2] * torch.einsum("majc,jc->maj", k, r_k)
        probabilities = logits.softmax(dim=-1)
        found.append((torch.einsum("maj,majc->mac", probabilities, v), torch.einsum("maj,jc->mac", probabilities, r_v)))
    content, position = (torch.stack(parts, dim=1).flatten(2) for parts in zip(*found, strict=True))
    return content, position


EINSUMS: dict[str, Core] = {"einsum": over_pairs, "einsum_a_position": a_position}


class EinsumAttention(nn.Module):
    """The layer with another formulation of its core; [B, h, w, C] in and out."""

    def __init__(self, attention: HfAxialResNetAttention, core: Core) -> None:
        super().__init__()
        self.own, self.core = attention, core

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        own = self.own
        lines = features if own.axis == 2 else features.transpose(1, 2)
        shape, length = lines.shape, lines.shape[2]
        qkv = own.qkv(lines.flatten(0, 1)).unflatten(2, (HEADS, 4 * own.key_size)).transpose(1, 2)  # [M, A, L, 4K]
        content, position = (part.flatten(0, 1) for part in self.core(qkv, own.table(length), own.logit_norm))
        summed = (own.content_norm(content) + own.position_norm(position)).view(shape)
        return summed if own.axis == 2 else summed.transpose(1, 2)


def with_einsum(model: HfAxialResNetModel, core: Core) -> HfAxialResNetModel:
    twin = copy.deepcopy(model)
    for stage in twin.encoder.stages:
        for unit in stage:
            unit.column, unit.row = EinsumAttention(unit.column, core), EinsumAttention(unit.row, core)
    return twin


def step(module: nn.Module, images: torch.Tensor) -> None:
    """Forward and backward."""
    outputs = module(images)
    outputs = outputs if isinstance(outputs, torch.Tensor) else outputs.pooler_output
    outputs.square().mean().backward()
    module.zero_grad()


def compare(report: Script, contestants: dict[str, nn.Module], images: torch.Tensor, training: bool, **row: Any):
    """One row: "ours" against every other contestant."""
    for module in contestants.values():
        module.train(training)
    run = step if training else lambda module, given: module(given)
    with torch.set_grad_enabled(training):
        found = [module(images) for module in contestants.values()]
        turns = {name: lambda module=module: run(module, images) for name, module in contestants.items()}
        seconds = take_turns(turns, report.options.turns, warm_up=1)
    outputs = [f if isinstance(f, torch.Tensor) else f.pooler_output for f in found]
    ratios = {f"times_as_fast_as_{name}": speed_ratio(seconds, "ours", name) for name in contestants if name != "ours"}
    report.add(
        **row,
        training=training,
        milliseconds=round(1e3 * quartiles(seconds["ours"]).median, 2),
        **ratios,
        largest_difference=float(f"{max((o - outputs[0]).abs().max().item() for o in outputs):.1e}"),
    )


def main() -> None:
    options = parser(__doc__, turns=5)
    options.add_argument("--stem-width", type=int, default=64, help="64 is AxialResNet-L, 32 is S")
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    report = Script(options.parse_args())
    torch.manual_seed(0)
    width = report.options.stem_width
    network = HfAxialResNetModel(HfAxialResNetConfig(stem_width=width)).eval()
    for module in network.modules():
        if isinstance(module, HfAxialResNetBottleneck):  # zero at the start, which would hide a difference
            nn.init.constant_(module.expand.norm.weight, 0.2)
    for batch in report.options.batches:
        for training in (False, True):
            cores = {name: core for name, core in EINSUMS.items() if not training or core is over_pairs}
            for span, multiple in SPANS.items():
                config = HfAxialResNetConfig(image_size=4 * span)
                attention = HfAxialResNetAttention(config, 2 * width * multiple, axis=2, stride=4)
                nn.init.normal_(attention.offset_embeddings, std=0.3)
                features = torch.randn(batch, span, span, 2 * width * multiple)
                twins = {name: EinsumAttention(attention, core) for name, core in cores.items()}
                part = f"attention, span {span}"
                compare(report, {"ours": attention, **twins}, features, training, part=part, batch=batch)
            images = torch.randn(batch, 3, 224, 224)
            twins = {name: with_einsum(network, core) for name, core in cores.items()}
            compare(report, {"ours": network, **twins}, images, training, part="network, 224 px", batch=batch)
    report.finish()


if __name__ == "__main__":
    main()
