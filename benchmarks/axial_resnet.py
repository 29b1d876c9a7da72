"""AxialResNet's attention beside the einsum over pairs of places, at the spans of its stages.

    python benchmarks/axial_resnet.py [--turns 5] [--threads N] [--output benchmarks/results/axial_resnet.json]

Both sides compute the same layer on the same weights (AxialResNet-L by default): projections, batch norms, logits
q.k + q.r^q + k.r^k, softmax, values + r^v. The einsum side is the usual formulation: the tables are gathered to
[L, L, K], each term of the logits is written out, normed and summed. Then whole networks, in evaluation: hf_vit's, and
the same one with the einsum in every attention. Training rows are a forward and a backward pass of the layer. A row
names the largest difference of the two outputs.
"""

import copy
from typing import Any

import torch
from pairing import Report, parser, quartiles, speed_ratio, take_turns
from torch import nn
from torch.nn import functional as F

from hf_vit.models.configuration_hf_axial_resnet import HEADS, HfAxialResNetConfig
from hf_vit.models.modeling_hf_axial_resnet import (
    HfAxialResNetAttention,
    HfAxialResNetBottleneck,
    HfAxialResNetModel,
)

SPANS = {56: 1, 28: 2, 14: 4}  # places of a line -> multiple of the first stage's width


class EinsumAttention(nn.Module):
    """The same layer, one einsum a term; [B, h, w, C] in and out."""

    def __init__(self, attention: HfAxialResNetAttention) -> None:
        super().__init__()
        self.own = attention

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        own, norm = self.own, self.own.logit_norm
        lines = features if own.axis == 2 else features.transpose(1, 2)
        shape, length, size = lines.shape, lines.shape[2], own.key_size
        qkv = own.qkv(lines.flatten(0, 1)).transpose(1, 2).unflatten(1, (HEADS, 4 * size))  # [M, A, 4K, L]
        q, k, v = qkv.split([size, size, 2 * size], dim=2)
        place = torch.arange(length)
        pairs = own.table(length)[place - place[:, None] + length - 1]
        r_q, r_k, r_v = pairs.split([size, size, 2 * size], dim=2)
        terms = [torch.einsum("maci,macj->maij", q, k), torch.einsum("maci,ijc->maij", q, r_q)]
        terms.append(torch.einsum("macj,ijc->maij", k, r_k))
        mean = None if self.training else norm.running_var.new_zeros(3 * HEADS)
        variance = None if self.training else norm.running_var.flatten()
        logits = F.batch_norm(
            torch.cat(terms, dim=1), mean, variance, norm.weight.flatten(), training=self.training, eps=norm.eps
        )
        probabilities = logits.unflatten(1, (3, HEADS)).sum(1).softmax(dim=-1)
        content = torch.einsum("maij,macj->miac", probabilities, v).reshape(-1, shape[3])
        position = torch.einsum("maij,ijc->miac", probabilities, r_v).reshape(-1, shape[3])
        summed = (own.content_norm(content) + own.position_norm(position)).view(shape)
        return summed if own.axis == 2 else summed.transpose(1, 2)


def with_einsum(model: HfAxialResNetModel) -> HfAxialResNetModel:
    twin = copy.deepcopy(model)
    for stage in twin.stem.stages:
        for unit in stage:
            unit.column, unit.row = EinsumAttention(unit.column), EinsumAttention(unit.row)
    return twin


def step(module: nn.Module, images: torch.Tensor) -> None:
    """Forward and backward."""
    outputs = module(images)
    outputs = outputs if isinstance(outputs, torch.Tensor) else outputs.pooler_output
    outputs.square().mean().backward()
    module.zero_grad()


def compare(report: Report, ours: nn.Module, theirs: nn.Module, images: torch.Tensor, training: bool, **row: Any):
    ours.train(training), theirs.train(training)
    with torch.set_grad_enabled(training):
        found = [module(images) for module in (ours, theirs)]
        outputs = [f if isinstance(f, torch.Tensor) else f.pooler_output for f in found]
        run = step if training else lambda module, given: module(given)
        turns = {"ours": lambda: run(ours, images), "einsum": lambda: run(theirs, images)}
        seconds = take_turns(turns, report.options.turns, warm_up=1)
    report.add(
        **row,
        training=training,
        milliseconds=round(1e3 * quartiles(seconds["ours"]).median, 2),
        times_as_fast=speed_ratio(seconds, "ours", "einsum"),
        largest_difference=float(f"{(outputs[0] - outputs[1]).abs().max().item():.1e}"),
    )


def main() -> None:
    options = parser(__doc__, turns=5)
    options.add_argument("--stem-width", type=int, default=64, help="64 is AxialResNet-L, 32 is S")
    options.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    report = Report(options.parse_args())
    torch.manual_seed(0)
    width = report.options.stem_width
    network = HfAxialResNetModel(HfAxialResNetConfig(stem_width=width)).eval()
    for module in network.modules():
        if isinstance(module, HfAxialResNetBottleneck):  # zero at the start, which would hide a difference
            nn.init.constant_(module.expand.norm.weight, 0.2)
    for batch in report.options.batches:
        for training in (False, True):
            for span, multiple in SPANS.items():
                config = HfAxialResNetConfig(image_size=4 * span)
                attention = HfAxialResNetAttention(config, 2 * width * multiple, axis=2, stride=4)
                nn.init.normal_(attention.offset_embeddings, std=0.3)
                features = torch.randn(batch, span, span, 2 * width * multiple)
                part = f"attention, span {span}"
                compare(report, attention, EinsumAttention(attention), features, training, part=part, batch=batch)
        images = torch.randn(batch, 3, 224, 224)
        compare(report, network, with_einsum(network), images, False, part="network, 224 px", batch=batch)
    report.finish()


if __name__ == "__main__":
    main()
