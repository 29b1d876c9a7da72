"""Forward and backward of every family, head and choice: shapes, gradients, sizes, dtypes, checkpointing, batches."""

import copy

import pytest
import torch
from models.families import (
    ATTENTION,
    BLOCKS,
    FAMILIES,
    OTHERS,
    TABLES,
    Family,
    checkpoint_activations,
    pad,
    tensors_of,
    training_loss,
)

from hf_vit.models.modeling_hf_vit import HfViTAttention


def test_shapes(family: Family, head: str, choice: str):
    model = family.shared(head, choice)
    config, tokens = model.config, family.num_tokens(model.config)
    double = 2 if config.pooling == "token_and_gap" else 1
    images, (h, w), pooled = family.images(config), config.grid, config.representation_size or 32 * double
    outputs = model(images, output_hidden_states=True)
    shapes = {
        "model": [(2, tokens, 32), (2, pooled)],
        "classification": [(2, config.num_labels or pooled)],
        "masked_prediction": [tuple(images.shape)],
        "backbone": [(2, 32, h, w)],
    }[head]
    assert [tuple(tensor.shape) for tensor in tensors_of(outputs)[: len(shapes)]] == shapes
    assert [tuple(state.shape) for state in outputs.hidden_states] == [(2, tokens, 32)] * (config.num_hidden_layers + 1)
    assert all(tensor.isfinite().all() for tensor in tensors_of(outputs))


@pytest.mark.choices(*BLOCKS)
def test_hidden_states_are_the_blocks_inputs_and_the_last_output(family: Family, choice: str):
    model = family.build("model", choice)
    seen: list[torch.Tensor] = []
    for layer in set(model.layer_sequence()):
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.clone()))
    outputs = model(family.images(model.config), output_hidden_states=True)
    assert len(seen) == model.config.num_hidden_layers
    for state, block_output in zip(outputs.hidden_states[1:], seen, strict=True):
        torch.testing.assert_close(state, block_output, rtol=0, atol=0)
    torch.testing.assert_close(model.layernorm(seen[-1]), outputs.last_hidden_state, rtol=0, atol=0)


def test_every_parameter_gets_a_gradient(family: Family, head: str, choice: str):
    model = family.build(head, choice).train()
    training_loss(family, head, model, family.images(model.config)).backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    zero = {name for name, p in model.named_parameters() if p.grad is not None and not p.grad.any()}
    assert (missing, zero - without_gradient(model, head)) == ([], set())


def without_gradient(model, head: str) -> set[str]:
    """Parameters whose gradient is zero by the mathematics, up to rounding."""
    config, names = model.config, [name for name, _ in model.named_parameters()]
    # The softmax is blind to a constant added to all the keys of a query.
    blind = {name for name in names if name.endswith("k_proj.bias")}
    if config.position_embedding.startswith("relative") and config.pooling == "token" and head == "classification":
        # Relative positions lie between patches, and the last layer is read at the class token alone.
        blind.add([name for name in names if name.endswith("offset_embeddings")][-1])
    if config.is_causal and head in ("backbone", "masked_prediction"):
        # No patch sees the tokens that stand last.
        blind |= {name for name in names if name.endswith(("cls_token", "distillation_token"))}
    return blind


def test_dropout_and_drop_path_act_in_training_only(family: Family, head: str):
    model = family.build(head, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2, drop_path_rate=0.5)
    images = family.images(model.config)
    first, second = (tensors_of(model(images))[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    model.train()
    first, second = (tensors_of(model(images))[0] for _ in range(2))
    assert (first - second).abs().max() > 1e-2


def test_attention_pooling_has_no_dropout():
    """As big_vision's, whatever the blocks have."""
    model = FAMILIES["plain"].build("model", "map", hidden_dropout_prob=0.5)
    model.pooler.train()
    images = FAMILIES["plain"].images(model.config)
    torch.testing.assert_close(model(images).pooler_output, model(images).pooler_output, rtol=0, atol=0)


@pytest.mark.choices(
    *TABLES, "gap", "map_with_class_token", "rectangular", "rectangular_patch", "root_alone", "strided"
)
def test_other_sizes_than_nominal(family: Family, choice: str):
    """Without a flag, and the same as a model whose nominal size that is."""
    model = family.shared("model", choice, torch.float64)
    for grid in ((1, 1), (2, 7), (6, 5)):
        images = family.images(model.config, grid=grid, dtype=torch.float64)
        on_the_fly = model(images)
        assert on_the_fly.last_hidden_state.shape[1] == family.num_tokens(model.config, grid)
        resized = copy.deepcopy(model)
        resized.resize_to(image_size=tuple(images.shape[2:]))
        assert resized.config.grid == grid
        for given, wanted in zip(tensors_of(on_the_fly), tensors_of(resized(images)), strict=True):
            torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12, msg=lambda m, g=grid: f"{g}: {m}")


@pytest.mark.choices(*ATTENTION, *BLOCKS, "resnet_stem", "root_alone")
def test_an_image_of_a_batch_is_computed_as_if_alone(family: Family, choice: str):
    """Under no mask, and under one that hides nothing."""
    model = family.shared("model", choice, torch.float64)
    images = family.images(model.config, batch=3, dtype=torch.float64)
    mask = torch.ones(3, *model.config.grid, dtype=torch.bool)
    together, masked = tensors_of(model(images)), tensors_of(model(images, patch_attention_mask=mask))
    alone = zip(*(tensors_of(model(image[None])) for image in images), strict=True)
    for given, other, wanted in zip(together, masked, map(torch.cat, alone), strict=True):
        torch.testing.assert_close(given, wanted, rtol=0, atol=1e-12)
        torch.testing.assert_close(other, wanted, rtol=0, atol=1e-12)


READS = []


class Counted(torch.Tensor):
    """A tensor that records in `READS` when Python reads its values, for which a GPU would be waited for."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        output = super().__torch_function__(func, types, args, kwargs)
        if func in (torch.Tensor.cpu, torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.tolist):
            READS.append(func)
        return output.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else output


def test_the_mask_of_a_padded_batch_is_read_once():
    """transformers reads it a second time."""
    model = FAMILIES["plain"].shared()
    images = FAMILIES["plain"].images(model.config, batch=6)
    READS.clear()
    model(images, patch_attention_mask=torch.ones(6, *model.config.grid).as_subclass(Counted))
    assert len(READS) <= 2


@pytest.mark.choices(*ATTENTION, *TABLES, "downsampled", "norm_after_gap", "no_last_norm", "resnet_stem")
def test_padded_batch_of_mixed_sizes(family: Family, head: str, choice: str):
    """Each image of a padded batch gets the outputs it has alone, special tokens and patches."""
    model = family.shared(head, choice, torch.float64)
    grids, padded = [(2, 3), (4, 1), (3, 4), (2, 3)], (4, 5)
    singles = [family.images(model.config, 1, grid, torch.float64) for grid in grids]
    images, mask = pad(model.config, singles, grids, padded)
    together = model(images, patch_attention_mask=mask)
    for index, (single, grid) in enumerate(zip(singles, grids, strict=True)):
        alone = model(single)
        own = {name: tensor[index] for name, tensor in outputs_of(together).items()}
        if head == "model":
            own["last_hidden_state"] = own["last_hidden_state"][token_places(model.config, grid, padded)]
        if head == "masked_prediction":
            (stride_h, stride_w), logits = model.config.patch_stride, own.get("logits")
            own["reconstruction"] = own["reconstruction"][:, : grid[0] * stride_h, : grid[1] * stride_w]
            if logits is not None:
                own["logits"] = logits[token_places(model.config, grid, padded, special=0)]
        if head == "backbone":
            own["feature_maps"] = own["feature_maps"][:, : grid[0], : grid[1]]
        for name, wanted in outputs_of(alone).items():
            torch.testing.assert_close(own[name], wanted[0], rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("dtype", "value"), [(torch.float16, 1000.0), (torch.bfloat16, 1.25)])
def test_mean_of_a_padded_batch_in_half_precision(dtype: torch.dtype, value: float):
    """The sum exceeds float16, and bfloat16 has no 289, the number of patches."""
    model = FAMILIES["plain"].build(image_size=68, pooling="gap", norm_after_pooling=None).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    torch.nn.init.constant_(model.embeddings.patch_embeddings.projection.bias, value)
    images = torch.zeros(1, 3, 68, 72, dtype=dtype)
    pooled = model(images, patch_attention_mask=(torch.arange(18) < 17).expand(1, 17, 18)).pooler_output
    assert (pooled == value).all()


def outputs_of(outputs) -> dict[str, torch.Tensor]:
    return {name: value if isinstance(value, torch.Tensor) else value[0] for name, value in outputs.items()}


def token_places(config, grid, padded, special=None) -> list[int]:
    """Where the tokens of an image of `grid` stand in the sequence of the padded batch."""
    special, (h, w) = config.num_special_tokens if special is None else special, padded
    patches = [row * w + column for row in range(grid[0]) for column in range(grid[1])]
    if config.is_causal:
        return patches + [h * w + i for i in range(special)]
    return list(range(special)) + [special + place for place in patches]


@pytest.mark.choices(
    *("learned_2d", "sincos_2d", "relative", "relative_bias", "map", "causal", "layer_scale", "resnet_stem"),
    *("rotary", "rotary_gap", "rotary_mixed"),
)
def test_precisions_agree(family: Family, choice: str):
    """float64 and bfloat16 with float32, in evaluation; autocast to bfloat16 in training."""

    def outputs(dtype: torch.dtype) -> list[torch.Tensor]:
        found = [*tensors_of(model.to(dtype).vit(images.to(dtype))), *tensors_of(model(images.to(dtype)))]
        assert {tensor.dtype for tensor in found} == {dtype}
        return found

    model = family.build("classification", choice)
    images = family.images(model.config)
    for single, double in zip(outputs(torch.float32), outputs(torch.float64), strict=True):
        error = single.double() - double
        # whole outputs; single elements of a hybrid differ more on some processors
        assert error.norm() < 4e-6 * double.norm()
        assert error.abs().max() < 5e-5
    images, lengths = family.images(model.config, batch=16, dtype=torch.bfloat16), []
    # What roundings add up to in a single hybrid is a draw, 2 to 9%: four together.
    for seed in range(4 if family.name == "hybrid" else 1):
        model = family.build("classification", choice, seed=seed)
        pairs = zip(outputs(torch.bfloat16), outputs(torch.float32), strict=True)
        lengths.append([((rough.float() - single).norm().item(), single.norm().item()) for rough, single in pairs])
    error, length = torch.tensor(lengths).norm(dim=0).T
    bound = 0.05 if family.name == "hybrid" else 0.02  # 8 bits of mantissa, a few dozen roundings
    assert (error < bound * length).all()
    images = family.images(model.config)
    model.train()
    single = training_loss(family, "classification", model, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = training_loss(family, "classification", model, images)
    loss.backward()
    torch.testing.assert_close(loss.float(), single, rtol=0.05, atol=0.05)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.choices(*BLOCKS, "causal_map_2d", "distillation", "resnet_stem")
def test_checkpointing_changes_no_gradient(family: Family, head: str, choice: str):
    model = family.build(head, choice, dtype=torch.float64).train()
    images = family.images(model.config, dtype=torch.float64)
    training_loss(family, head, model, images).backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    checkpoint_activations(model)
    calls = count_calls(model)
    training_loss(family, head, model, images).backward()
    attentions = len(family.attentions_of(torch.zeros(1, 1), (1, 1)))
    assert len(calls) == 2 * attentions * model.config.num_hidden_layers, "every block runs again in the backward pass"
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name], rtol=0, atol=1e-12)


def count_calls(model) -> list[str]:
    calls: list[str] = []
    for module in model.modules():
        if isinstance(module, HfViTAttention):
            module.register_forward_hook(lambda module, inputs, output: calls.append("call"))
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES | OTHERS)
def test_tuples_by_the_configuration(name: str):
    family = (FAMILIES | OTHERS)[name]
    for head in family.classes:
        model = family.build(head)
        images = family.images(model.config)
        wanted = model(images)
        model.config.return_dict = False
        given = model(images)
        assert type(given) is tuple
        for ours, theirs in zip(given, wanted.to_tuple(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
