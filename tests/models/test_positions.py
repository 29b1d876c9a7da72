"""Position tables and patch kernels against slow loops, scipy and properties that define them."""

import math

import numpy as np
import pytest
import torch
from models.families import FAMILIES, OTHERS
from scipy.ndimage import zoom
from timm.layers import RelPosBias
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hf_vit.models.embeddings_hf_vit import (
    RelativePositionBias,
    RelativePositionKeys,
    _compute_bicubic_weights,
    make_sincos_1d_table,
    make_sincos_2d_table,
    resample_patch_kernel,
    resample_position_table,
)

PLAIN = FAMILIES["plain"]
GRIDS = [((4, 4), (7, 7)), ((4, 6), (9, 5)), ((7, 5), (3, 4)), ((3, 3), (3, 8)), ((14, 14), (24, 24)), ((4, 4), (1, 3))]


def scipys(table: np.ndarray, new: tuple[int, int]) -> np.ndarray:
    """[h, w, D] resized as the original code does."""
    return zoom(table, (new[0] / table.shape[0], new[1] / table.shape[1], 1), order=1)


@pytest.mark.parametrize(("old", "new"), GRIDS, ids=str)
@pytest.mark.parametrize("special", [0, 1, 2])
def test_learned_table_is_resampled_as_scipy_does(old, new, special):
    table = torch.randn(1, special + old[0] * old[1], 6, dtype=torch.float64)
    given = resample_position_table(table, old, new, num_prefix_tokens=special)
    assert torch.equal(given[:, :special], table[:, :special])
    wanted = scipys(table[0, special:].reshape(*old, 6).numpy(), new).reshape(-1, 6)
    np.testing.assert_allclose(given[0, special:].numpy(), wanted, rtol=0, atol=1e-12)


def test_resampling_in_bfloat16_and_of_a_wrong_table():
    table = torch.randn(1, 17, 8).bfloat16()
    wanted = resample_position_table(table.float(), (4, 4), (6, 6)).bfloat16()
    assert torch.equal(resample_position_table(table, (4, 4), (6, 6)), wanted)
    with pytest.raises(ValueError, match=r"\(1, 16, 8\), but a grid of 4x4 patches with 1 spec.*\[1, 17, D\]"):
        resample_position_table(table[:, 1:], (4, 4), (6, 6))
    with pytest.raises(ValueError, match=r"has shape \(17, 8\)"):
        resample_position_table(table[0], (4, 4), (6, 6))


@pytest.mark.parametrize("grid", [(4, 6), (1, 5), (3, 3)])
def test_sincos_tables_are_the_formula(grid):
    h, w = grid
    two, one = make_sincos_2d_table(grid, 16).numpy(), make_sincos_1d_table(grid, 16).numpy()
    for y in range(h):
        for x in range(w):
            for k in range(4):
                frequency = 1 / 10_000 ** (k / 3)
                row = two[y * w + x]
                assert row[k] == pytest.approx(math.sin(x * frequency), abs=1e-12)
                assert row[4 + k] == pytest.approx(math.cos(x * frequency), abs=1e-12)
                assert row[8 + k] == pytest.approx(math.sin(y * frequency), abs=1e-12)
                assert row[12 + k] == pytest.approx(math.cos(y * frequency), abs=1e-12)
            for k in range(8):
                frequency, place = 1 / 10_000 ** (k / 7), y * w + x
                assert one[place, k] == pytest.approx(math.sin(place * frequency), abs=1e-12)
                assert one[place, 8 + k] == pytest.approx(math.cos(place * frequency), abs=1e-12)


def added_to_patches(model, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the embeddings add to the special tokens [T, D] and to the patches [h*w, D]."""
    embeddings = model.embeddings
    given = embeddings(images).hidden_states[0]
    bare = embeddings.patch_embeddings(images)[0]
    names = ("cls_token", "distillation_token", "register_tokens")
    tokens = torch.cat([bare[:0], *(getattr(embeddings, name)[0] for name in names if hasattr(embeddings, name))])
    count = len(tokens)
    return given[:count] - tokens, given[count:] - bare


@pytest.mark.parametrize("grid", [(4, 4), (5, 3)])
@pytest.mark.parametrize(
    "choice",
    [
        *("default", "gap", "distillation", "table_before_class_token", "learned_2d", "table_2d_before_class_token"),
        *("sincos_1d", "sincos_2d", "relative", "no_position", "registers", "positions_of_registers"),
        "positions_of_registers_alone",
    ],
)
def test_what_is_added_to_which_token(choice: str, grid: tuple[int, int]):
    """Every kind of table, at the nominal grid and at another, written out by loops and scipy."""
    model = PLAIN.build("model", choice, dtype=torch.float64).requires_grad_(False)
    special, patches = added_to_patches(model, PLAIN.images(model.config, 1, grid, torch.float64))
    (h, w), embeddings, config = grid, model.embeddings, model.config
    wanted = np.zeros((h, w, 32))
    wanted_special = np.zeros((config.num_special_tokens, 32))
    rows_first = config.position_on_class_token
    if config.position_embedding == "learned":
        table = embeddings.position_embeddings[0].numpy()
        count = config.num_special_tokens if rows_first else 0
        count -= 0 if rows_first == "with_registers" else config.num_register_tokens
        wanted_special[:count] = table[:count]
        wanted = scipys(table[count:].reshape(4, 4, 32), grid)
    elif config.position_embedding == "learned_2d":
        rows = zoom(embeddings.row_position_embeddings[0].numpy(), (h / 4, 1), order=1)
        columns = zoom(embeddings.column_position_embeddings[0].numpy(), (w / 4, 1), order=1)
        for y in range(h):
            for x in range(w):
                wanted[y, x] = np.concatenate([rows[y], columns[x]])
        if rows_first and config.num_special_tokens:
            wanted_special[:] = embeddings.class_position_embedding[0].numpy()
    elif config.position_embedding.startswith("sincos"):
        table = {"sincos_1d": make_sincos_1d_table, "sincos_2d": make_sincos_2d_table}[config.position_embedding]
        wanted = table(grid, 32).numpy().reshape(h, w, 32)
    np.testing.assert_allclose(patches.numpy(), wanted.reshape(-1, 32), rtol=0, atol=1e-12)
    np.testing.assert_allclose(special.numpy(), wanted_special, rtol=0, atol=1e-12)


def test_relative_keys_are_a_triple_loop():
    """Resampled; at the nominal grid test_attention.py holds them."""
    config, grid = PLAIN.config("relative", image_size=(16, 24)), (3, 5)
    bias = RelativePositionKeys(config).double().requires_grad_(False)
    bias.offset_embeddings.normal_()
    query, scaling, (h, w) = torch.randn(2, 4, 1 + grid[0] * grid[1], 8, dtype=torch.float64), 8**-0.5, grid
    table = scipys(bias.offset_embeddings.reshape(7, 11, 8).numpy(), (2 * h - 1, 2 * w - 1))
    given = bias(query, grid, scaling, None).numpy()
    assert not given[:, :, 0].any()
    assert not given[..., 0].any()
    for q in range(h * w):
        for k in range(h * w):
            offset = table[q // w - k // w + h - 1, q % w - k % w + w - 1]
            wanted = np.einsum("bad,d->ba", query[:, :, 1 + q].numpy(), offset) * scaling
            np.testing.assert_allclose(given[:, :, 1 + q, 1 + k], wanted, rtol=0, atol=1e-12)


def test_relative_bias_is_timms():
    """Swin's, as timm has it; resampled by scipy."""
    config, grid = PLAIN.config("relative_bias", image_size=(16, 24)), (3, 5)
    h, w = grid
    ours = RelativePositionBias(config).double().requires_grad_(False)
    ours.offset_embeddings.normal_()
    table = scipys(ours.offset_embeddings.reshape(7, 11, 4).numpy(), (2 * h - 1, 2 * w - 1))
    theirs = RelPosBias(grid, num_heads=4).double().requires_grad_(False)
    theirs.relative_position_bias_table.copy_(torch.from_numpy(table.reshape(-1, 4)))
    given = ours(torch.randn(2, 4, 1 + h * w, 8, dtype=torch.float64), grid, 0.5, None)
    assert not given[:, :, 0].any()
    assert not given[..., 0].any()
    wanted = theirs.get_bias().expand(2, -1, -1, -1)
    torch.testing.assert_close(given[:, :, 1:, 1:], wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"needs all 4 heads in one process, which has 2 .* without tp_plan"):
        ours(torch.randn(2, 2, 1 + h * w, 8, dtype=torch.float64), grid, 0.5, None)


def resize_patches(patches: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """torch's antialiasing (2.15) goes wrong on maps of one column."""
    down, across = (
        torch.from_numpy(linear_weights(*sides, True)) for sides in zip(patches.shape[2:], size, strict=True)
    )
    return down @ patches @ across.T


@pytest.mark.parametrize("new", [(8, 8), (6, 9), (4, 5)])
def test_enlarged_patches_keep_their_embedding(new):
    kernel, patches = torch.randn(7, 3, 4, 5, dtype=torch.float64), torch.randn(11, 3, 4, 5, dtype=torch.float64)
    resized = resample_patch_kernel(kernel, new)
    assert resized.shape == (7, 3, *new)
    before = torch.einsum("dchw,nchw->nd", kernel, patches)
    after = torch.einsum("dchw,nchw->nd", resized, resize_patches(patches, new))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-10)


@pytest.mark.parametrize("new", [(2, 2), (3, 4), (3, 1)])
def test_shrunk_patches_keep_their_embedding_in_least_squares(new):
    """The kernel minimises the mean squared change over white noise: numpy's solver on the resize as a matrix."""
    kernel = torch.randn(7, 3, 4, 5, dtype=torch.float64)
    pixels = torch.eye(20, dtype=torch.float64).reshape(20, 1, 4, 5)
    resize = resize_patches(pixels, new).reshape(20, -1).numpy()  # [old pixels, new pixels]
    wanted = np.linalg.lstsq(resize, kernel.flatten(2).permute(2, 0, 1).reshape(20, -1).numpy(), rcond=None)[0]
    given = resample_patch_kernel(kernel, new).flatten(2).permute(2, 0, 1).reshape(new[0] * new[1], -1)
    np.testing.assert_allclose(given.numpy(), wanted, rtol=0, atol=1e-10)


def linear_weights(old: int, new: int, antialias: bool) -> np.ndarray:
    """[new, old], how jax.image.resize ("linear") makes a line of another; without antialiasing TensorFlow's bilinear.

    A triangle around the place of each new pixel, as wide as a new pixel where it shrinks and smoothing is asked for.
    """
    places = (np.arange(new) + 0.5) * old / new - 0.5
    width = max(old / new, 1.0) if antialias else 1.0
    weights = np.maximum(1 - np.abs(places[:, None] - np.arange(old)) / width, 0)
    return weights / weights.sum(1, keepdims=True)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (2, 2)), ((4, 5), (3, 8)), ((6, 4), (9, 4))])
def test_kernels_and_positions_of_flexivit(old, new, tmp_path):
    """Its published method: pinv of the transposed resize matrix (tf.image.resize); jax.image.resize for the table."""
    sizes = {"patch_size": old, "image_size": (7 * old[0], 7 * old[1])}
    model = PLAIN.build("classification", "gap", dtype=torch.float64, **sizes)
    model.save_pretrained(tmp_path)
    size, choice = (5 * new[0], 9 * new[1]), {"position_interpolation": "flexivit"}
    other = type(model).from_pretrained(tmp_path, patch_size=new, image_size=size, **choice)
    resize = np.kron(*(linear_weights(*sides, antialias=False) for sides in zip(old, new, strict=True)))  # [new, old]
    kernel = model.vit.embeddings.patch_embeddings.projection.weight.detach().numpy()
    wanted = (kernel.reshape(-1, old[0] * old[1]) @ np.linalg.pinv(resize.T).T).reshape(*kernel.shape[:2], *new)
    given = other.vit.embeddings.patch_embeddings.projection.weight.detach()
    np.testing.assert_allclose(given, wanted, rtol=0, atol=1e-10)
    table = model.vit.embeddings.position_embeddings.detach().numpy()[0]
    wanted = np.kron(linear_weights(7, 5, antialias=True), linear_weights(7, 9, antialias=True)) @ table
    np.testing.assert_allclose(other.vit.embeddings.position_embeddings[0].detach(), wanted, rtol=0, atol=1e-12)
    assert other.config.position_interpolation == "flexivit"
    model.config.position_interpolation = "flexivit"  # read at every resize
    with torch.device("meta"):  # wherever a script lets torch build tensors
        model.resize_to(size, new)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("new", [(3, 1), (9, 1), (1, 3), (1, 1)])
def test_a_table_for_images_of_one_column_or_row(new):
    table = torch.randn(1, 35, 6, dtype=torch.float64)
    wanted = (
        np.kron(linear_weights(7, new[0], antialias=True), linear_weights(5, new[1], antialias=True)) @ table[0].numpy()
    )
    given = resample_position_table(table, (7, 5), new, num_prefix_tokens=0, mode="flexivit")
    np.testing.assert_allclose(given[0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "choice"), [("plain", "relative"), ("plain", "relative_bias"), ("axial_resnet", "default")]
)
def test_a_single_patch_is_at_no_offset_from_itself(name: str, choice: str):
    """Its relative position is the middle of every table, not a corner."""
    family = (FAMILIES | OTHERS)[name]
    model = family.build("model", choice)
    model(family.images(model.config)[:, :, :4, :4]).last_hidden_state.square().sum().backward()
    tables = [parameter.grad for key, parameter in model.named_parameters() if key.endswith("offset_embeddings")]
    assert all(table.any(dim=1).nonzero().tolist() == [[len(table) // 2]] for table in tables)


@pytest.mark.parametrize(("old", "new"), [(4, 6), (7, 3)])
def test_tables_of_rows_and_of_columns_are_smoothed_too(old: int, new: int):
    fields = {"position_interpolation": "flexivit", "image_size": (old * 4, old * 4)}
    model = PLAIN.build("model", "learned_2d", dtype=torch.float64, **fields)
    table = model.embeddings
    rows, _ = table.compute_position_table((new, new), like=torch.zeros(1))
    weights = linear_weights(old, new, antialias=True)
    halves = [weights @ getattr(table, f"{name}_position_embeddings").detach().numpy()[0] for name in ("row", "column")]
    wanted = np.concatenate([np.repeat(halves[0], new, axis=0), np.tile(halves[1], (new, 1))], axis=1)
    np.testing.assert_allclose(rows[0].detach(), wanted, rtol=0, atol=1e-12)
    model.resize_to((new * 4, new * 4))
    (resized, _) = table.compute_position_table((new, new), like=torch.zeros(1))
    np.testing.assert_allclose(resized[0].detach(), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["plain", "axial"])
def test_a_model_with_a_larger_patch_sees_the_same_in_larger_patches(name: str, tmp_path):
    row = FAMILIES[name]
    model = row.build("classification", dtype=torch.float64)
    model.save_pretrained(tmp_path)
    images = row.images(model.config, dtype=torch.float64)
    larger = row.classes["classification"].from_pretrained(tmp_path, patch_size=(6, 8), image_size=(24, 32))
    assert (larger.config.grid, larger.config.patch_size) == ((4, 4), (6, 8))
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).reshape(2, 3, 16, 4, 4).transpose(1, 2).flatten(0, 1)
    resized = resize_patches(patches, (6, 8)).reshape(2, 4, 4, 3, 6, 8)
    pasted = resized.permute(0, 3, 1, 4, 2, 5).reshape(2, 3, 24, 32)
    torch.testing.assert_close(larger(pasted).logits, model(images).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("old", "new"), [(5, 7), (5, 3), (4, 11), (9, 2), (2, 2), (1, 3)])
def test_an_offset_gives_the_same_in_a_graph(old: int, new: int):
    """Where sizes are symbols, weights take the place of torch's resize by a scale."""
    table = torch.randn(1, 3, old, old, dtype=torch.float64)
    wanted = F.interpolate(table, scale_factor=[(new + 0.1) / old] * 2, mode="bicubic")
    weights = _compute_bicubic_weights(old, new, 0.1)
    torch.testing.assert_close(weights @ table @ weights.T, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("choice", ["rotary", "rotary_gap", "rotary_mixed", "rotary_registers"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotations_are_computed_in_float32(choice: str, dtype: torch.dtype):
    """Periods and coordinates too, whatever dtype a model is cast to."""
    model = PLAIN.build("model", choice)
    images = PLAIN.images(model.config, grid=(3, 5))
    (wanted, given) = (form.embed(images, None).rotation for form in (model, PLAIN.build("model", choice).to(dtype)))
    assert given.dtype in (torch.float32, torch.complex64)
    assert torch.equal(given, wanted)
    outputs = PLAIN.build("model", choice).to(dtype)(images).last_hidden_state
    torch.testing.assert_close(outputs.float(), model(images).last_hidden_state, rtol=0, atol=0.2)


@pytest.mark.parametrize("pairing", ["halves", "interleaved"])
def test_models_that_differ_in_their_rotation_run_at_once(pairing: str):
    """By vmap, which does not write results of many models into the queries of one."""
    model = PLAIN.build("model", "rotary_mixed", dtype=torch.float64, rotary_pairing=pairing)
    model.set_attn_implementation("eager")
    images = PLAIN.images(model.config, dtype=torch.float64)
    own = {name: torch.stack([value, 2 * value]) for name, value in model.named_parameters() if "rotary" in name}
    assert own

    def run(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, changed, (images,)).last_hidden_state

    together = torch.func.vmap(run)(own)
    for number, outputs in enumerate(together):
        torch.testing.assert_close(outputs, run({name: value[number] for name, value in own.items()}))


@pytest.mark.parametrize("moved", ["rotary_shift", "rotary_jitter", "rotary_rescale"])
def test_training_moves_centered_coordinates(moved: str):
    """As DINOv3: by a shift, by a factor an axis, by one for both; read off angles too small to go round."""
    slow = {"rotary_periods": (100.0, 300.0), "num_register_tokens": 0, moved: 1.5}
    model = PLAIN.build("model", "rotary", dtype=torch.float64, **slow)
    images = PLAIN.images(model.config, grid=(4, 5), dtype=torch.float64)
    starts, factors = [], []
    for training in (False, True, True):
        sine = model.train(training).embed(images, None).rotation.imag
        angles = sine[0, 0, 1:].asin().unflatten(0, (4, 5)) * 100 / (2 * math.pi)  # [h, w, K/2], rows first
        first, last = angles[0, 0, [0, 2]], angles[-1, -1, [0, 2]]
        factors.append(
            (last - first) / torch.tensor([1.5, 1.6], dtype=torch.float64)
        )  # centers are 3/4 and 4/5 from the middle
        starts.append((first + last) / 2)
    torch.testing.assert_close(factors[0], torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(starts[0], torch.zeros(2, dtype=torch.float64))
    assert not torch.equal(torch.stack([starts[1], factors[1]]), torch.stack([starts[2], factors[2]]))
    for start, factor in zip(starts[1:], factors[1:], strict=True):
        is_shift = moved == "rotary_shift"
        assert (start.abs() <= 1.5).all()
        assert bool((start.abs() > 1e-6).all()) is is_shift
        assert ((factor >= 1 / 1.5) & (factor <= 1.5)).all()
        assert bool(((factor - 1).abs() < 1e-9).all()) is is_shift
        assert bool((factor[0] - factor[1]).abs() > 1e-9) is (moved == "rotary_jitter")


class NoFloat64(TorchDispatchMode):
    """Refuse float64 on the device "mps", as Apple's GPUs do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.device.type == "mps" and output.dtype == torch.float64:
            raise TypeError(f"{func} made float64")
        return output


@pytest.mark.parametrize("kind", ["sincos_2d", "sincos_1d"])
def test_apple_gpus_need_no_float64(kind: str):
    table = PLAIN.build("model", kind).embeddings
    with FakeTensorMode(), NoFloat64(), torch.no_grad():
        rows, _ = table.compute_position_table((3, 5), like=torch.empty(1, device="mps"))
        kernel = resample_patch_kernel(torch.empty(7, 3, 4, 4, device="mps"), (6, 6))
    assert {rows.device.type, kernel.device.type} == {"mps"}
    assert {rows.dtype, kernel.dtype} == {torch.float32}
