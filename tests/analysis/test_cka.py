"""CKA beside the estimator written out number by number, and its invariances."""

import itertools

import numpy as np
import pytest
import timm
import torch
from evaluation.tiny import make_images
from models.families import FAMILIES
from timm.models.mlp_mixer import MlpMixer
from torchvision.transforms.v2.functional import pil_to_tensor
from transformers import ResNetConfig, ResNetModel, ViTConfig, ViTImageProcessor, ViTModel

from hf_vit.analysis import AnalysisSettings, analyze
from hf_vit.analysis.cka import MinibatchCKA, compute_gram, compute_hsic, draw_cka
from hf_vit.loading.model import LoadedModel
from hf_vit.loading.outputs import find_layers

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def slow_hsic(first, second):
    """HSIC_1 as the U-statistic it is: a mean over all ordered quadruples of different images."""
    total, count = 0.0, 0
    for i, j, q, r in itertools.permutations(range(len(first)), 4):
        total += first[i, j] * (second[i, j] + second[q, r] - 2 * second[i, q])
        count += 1
    return total / count


def symmetric(kernel):
    return (kernel + kernel.T) / 2


def value(first, second, size):
    """CKA [L, L'] of features [B, ...] in minibatches of `size`."""
    running = MinibatchCKA()
    for start in range(0, len(first[0]), size):
        chosen = slice(start, start + size)
        running.update(*([compute_gram(layer[chosen]) for layer in layers] for layers in (first, second)))
    return running.value()


def features(count=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 5, 3, generator=generator), torch.randn(count, 7, generator=generator) + 2]


def test_hsic_equals_the_mean_over_quadruples():
    # float32 products are symmetric up to rounding only, and the two formulas read different halves.
    first, second = (torch.stack([symmetric(compute_gram(layer)) for layer in features(6, seed)]) for seed in (0, 1))
    found = compute_hsic(first, second)
    for i, j in itertools.product(range(2), range(2)):
        assert found[i, j].item() == pytest.approx(slow_hsic(first[i].numpy(), second[j].numpy()), rel=1e-9)


def test_hsic_does_not_see_the_mean_that_gram_takes_out():
    first, second = features(6)[1].double(), features(6, seed=1)[1].double()
    raw = compute_hsic((first @ first.T)[None], (second @ second.T)[None])
    found = compute_hsic(compute_gram(first)[None], compute_gram(second)[None])
    torch.testing.assert_close(found, raw, rtol=1e-4, atol=0)


def test_cka_does_not_see_rotation_scale_and_shift():
    plain = features(count=16)
    turn, _ = torch.linalg.qr(torch.randn(15, 15, generator=torch.Generator().manual_seed(3)))
    turned = [3 * plain[0].flatten(1) @ turn + 1, -0.1 * plain[1]]
    whole = value(plain, plain, 8)
    np.testing.assert_allclose(value(plain, turned, 8), whole, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(whole.diagonal(), 1, rtol=1e-6)
    assert abs(whole[0, 1]) < 0.9


def test_minibatches_agree_with_the_full_batch():
    """Related layers of 512 images: the whole at once, by a loop-free formula of another form, and in eighths."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(512, 6, generator=generator)
    second = first[:, :4] + 0.5 * torch.randn(512, 4, generator=generator)
    whole = value([first], [second], 512)[0, 0]
    centred = [kernel_u_centred(layer) for layer in (first, second)]
    products = [(a * b).sum() for a, b in ((centred[0], centred[1]), (centred[0],) * 2, (centred[1],) * 2)]
    assert whole == pytest.approx((products[0] / (products[1] * products[2]).sqrt()).item(), rel=1e-5)
    assert value([first], [second], 64)[0, 0] == pytest.approx(whole, abs=0.02)
    assert 0.5 < whole < 0.9


def kernel_u_centred(layer):
    """Szekely and Rizzo's U-centring, under which HSIC_1 is a plain inner product."""
    kernel = (layer.double() @ layer.double().T).fill_diagonal_(0)
    size = len(kernel)
    sums = kernel.sum(0)
    centred = kernel - (sums[:, None] + sums) / (size - 2) + kernel.sum() / ((size - 1) * (size - 2))
    return centred.fill_diagonal_(0)


def test_a_layer_that_says_nothing_has_no_cka():
    found = value([torch.ones(8, 3)], features(), 8)
    assert np.isnan(found).all()


def names(model):
    return list(find_layers(model))


def test_layers_that_are_compared():
    assert names(FAMILIES["plain"].build("classification")) == ["vit.embeddings", "vit.layers.0", "vit.layers.1"]
    assert names(FAMILIES["hybrid"].build()) == ["embeddings", "layers.0", "layers.1"]
    assert names(FAMILIES["axial"].build()) == ["embeddings", "layers.0", "layers.1"]
    resnet = ResNetModel(ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 2]))
    assert names(resnet) == [f"encoder.stages.{name}" for name in ("0.layers.0", "1.layers.0", "1.layers.1")]
    assert names(timm.create_model("resnet10t"))[:2] == ["layer1.0", "layer2.0"]
    mixer = MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=8, num_classes=3)
    assert names(mixer) == ["blocks.0", "blocks.1"]


def test_a_vit_beside_a_mixer_and_a_resnet_of_timm(with_processor):
    """Kernels read by hooks, of models of several libraries, beside features computed block by block."""
    images = make_images(9)
    vit, processor = with_processor(FAMILIES["plain"].build("classification"))
    mixer = MlpMixer(img_size=32, patch_size=8, num_blocks=2, embed_dim=8, num_classes=3).eval()
    resnet = timm.create_model("resnet10t").eval()
    pixels = torch.stack([pil_to_tensor(image.resize((32, 32))) / 255 for image in images])
    settings = AnalysisSettings(num_images=9, cka_batch_size=5)
    with torch.inference_mode():
        ours = vit(processor(images, return_tensors="pt")["pixel_values"], output_hidden_states=True).hidden_states
        blocks = [mixer.stem(pixels)]
        for block in mixer.blocks:
            blocks.append(block(blocks[-1]))
        theirs = {mixer: blocks[1:], resnet: []}
        features = resnet.maxpool(resnet.act1(resnet.bn1(resnet.conv1(pixels))))
        for stage in (resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4):
            features = stage(features)
            theirs[resnet].append(features)
    by_index = {image.tobytes(): row for row, image in enumerate(images)}
    for other, layers in theirs.items():
        subject = LoadedModel(other, lambda chosen: pixels[[by_index[image.tobytes()] for image in chosen]], "other")
        run = analyze((vit, processor), images, only=["cka_between"], settings=settings, against=subject)
        running = MinibatchCKA()
        for chosen in (slice(0, 5), slice(5, 9)):
            running.update(*([compute_gram(layer[chosen]) for layer in each] for each in (ours, layers)))
        np.testing.assert_allclose(run["cka_between"]["cka"], running.value(), rtol=1e-3, atol=1e-4)


def test_images_of_another_than_the_nominal_size():
    """transformers' ViT must be told."""
    vit = ViTModel(ViTConfig(**TINY, image_size=32, patch_size=8)).eval()
    run = analyze((vit, ViTImageProcessor(size={"height": 40, "width": 24})), make_images(4), only=["cka"])
    assert run["cka"]["cka"].shape == (3, 3)


def test_the_heat_map_names_whole_layers():
    """With few layers, ticks would stand between them."""
    axes = draw_cka(np.eye(4, 2, dtype=np.float32), "vit", "resnet").axes[0]
    assert {*axes.get_xticks(), *axes.get_yticks()} >= {0, 1, 2, 3}
    assert all(float(tick).is_integer() for tick in (*axes.get_xticks(), *axes.get_yticks()))
