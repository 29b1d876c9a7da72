"""Masking policies against counts by hand, and the batches they make."""

import pytest
import torch

from hf_vit import HfViTConfig, UserError
from hf_vit.training.tasks.masking import MaskingCollator, NextPatch, RandomMasking

CONFIG = HfViTConfig(image_size=16, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("rate", "count"), [(0.5, 8), (0.15, 2), (1.0, 16), (0.001, 1)])
def test_every_image_has_the_same_number_of_corrupted_patches(rate, count):
    masked, sources = RandomMasking(rate).draw(50, 16, seeded())
    assert masked.sum(dim=1).tolist() == [count] * 50
    assert masked.dtype == torch.bool
    assert sources.dtype == torch.int64


def test_what_is_seen_in_place_of_corrupted_patches_is_80_10_10():
    masked, sources = RandomMasking().draw(4000, 16, seeded())
    own = torch.arange(16).expand(4000, -1)
    counts = {"mask": 0, "other": 0, "kept": 0}
    for image_mask, image_sources in zip(masked.tolist(), sources.tolist(), strict=True):
        for place, source in enumerate(image_sources):
            if image_mask[place]:
                counts["mask" if source == -1 else "kept" if source == place else "other"] += 1
    total = sum(counts.values())
    assert total == 4000 * 8
    # Three standard deviations of a share of 10% among 32,000 are 0.5%.
    assert {name: round(number / total, 2) for name, number in counts.items()} == {
        "mask": 0.8,
        "other": 0.1,
        "kept": 0.1,
    }
    # Every place is corrupted as often, and every other patch is shown as often.
    assert masked.float().mean(dim=0).sub(0.5).abs().max() < 0.03
    distance = ((sources - own) % 16)[masked & (sources >= 0) & (sources != own)]
    assert set(distance.tolist()) == set(range(1, 16))
    assert torch.bincount(distance, minlength=16)[1:].float().div(len(distance)).sub(1 / 15).abs().max() < 0.02


def test_shares_can_be_others():
    masked, sources = RandomMasking(0.5, mask_share=1.0, swap_share=0.0).draw(10, 16, seeded())
    assert (sources[masked] == -1).all()
    masked, sources = RandomMasking(0.5, mask_share=0.0, swap_share=0.0).draw(10, 16, seeded())
    assert torch.equal(sources, torch.arange(16).expand(10, -1))
    assert RandomMasking().draw(3, 1, seeded())[1].max() <= 0, "an image of one patch has no other"


def test_next_patch_hides_nothing():
    masked, sources = NextPatch().draw(2, 5)
    assert masked.tolist() == [[False, True, True, True, True]] * 2
    assert sources.tolist() == [[0, 1, 2, 3, 4]] * 2
    with pytest.raises(UserError, match="one patch has no next one"):
        NextPatch().draw(2, 1)


def examples(indices, mixable=True, index=True):
    made = [{"pixel_values": torch.full((3, 16, 16), float(i)), "label": 0, "mixable": mixable} for i in indices]
    return [{**one, "index": i} if index else one for one, i in zip(made, indices, strict=True)]


def test_static_masks_stay_with_their_image_and_dynamic_ones_do_not():
    static = MaskingCollator(RandomMasking(), CONFIG, static=True, seed=3)
    first, again = static(examples([4, 7, 9])), static(examples([9, 4]))
    for name in ("bool_masked_pos", "patch_sources"):
        assert torch.equal(first[name][[2, 0]], again[name])
        assert not torch.equal(first[name][0], first[name][1])
    assert not torch.equal(
        MaskingCollator(RandomMasking(), CONFIG, True, seed=4)(examples([4]))["patch_sources"],
        again["patch_sources"][1:],
    )
    dynamic = MaskingCollator(RandomMasking(), CONFIG, seed=3)
    torch.manual_seed(0)
    one, two = dynamic(examples([4])), dynamic(examples([4]))
    assert not torch.equal(one["bool_masked_pos"], two["bool_masked_pos"])
    torch.manual_seed(0)
    assert torch.equal(dynamic(examples([4]))["patch_sources"], one["patch_sources"])


def test_images_to_be_judged_by_always_have_the_same_masks():
    dynamic = MaskingCollator(RandomMasking(), CONFIG)
    one, two = (dynamic(examples([1, 2], mixable=False)) for _ in range(2))
    assert torch.equal(one["patch_sources"], two["patch_sources"])
    streamed = [dynamic(examples([1, 2], mixable=False, index=False)) for _ in range(2)]
    assert torch.equal(streamed[0]["bool_masked_pos"], streamed[1]["bool_masked_pos"])
    assert not torch.equal(streamed[0]["bool_masked_pos"][0], streamed[0]["bool_masked_pos"][1])
    assert set(one) == {"pixel_values", "bool_masked_pos", "patch_sources"}
    with pytest.raises(UserError, match=r"static masks.*stream.*dynamic"):
        MaskingCollator(RandomMasking(), CONFIG, static=True)(examples([1], index=False))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((0.0,), "mask rate 0.0 must be above 0"),
        ((1.1,), "mask rate 1.1 must be above 0 and at most 1"),
        ((float("nan"),), "mask rate nan"),
        ((0.5, 0.8, 0.3), "0.8 become.*0.3.*together at most 1"),
        ((0.5, -0.1), "-0.1 become"),
    ],
)
def test_wrong_shares(shares, message):
    with pytest.raises(UserError, match=message):
        RandomMasking(*shares)
