"""Memory that runs out names the batch and the remedy, whatever ran out and wherever it did."""

import numpy as np
import pytest
import torch
from PIL import Image

from hf_vit import HfViTForImageClassification, UserError
from hf_vit.analysis import analyze
from hf_vit.data import make_processor
from hf_vit.errors import enough_memory, is_out_of_memory
from hf_vit.evaluation.reading import finite_logits
from hf_vit.models.modeling_hf_vit import HfViTLayer
from hf_vit.training import FinetuneOptions, HfViTTrainer, finetune, pretrain

TOO_MUCH = 1 << 52  # bytes


def failing_forward(*args, **kwargs):
    """A real failure of torch's allocator."""
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), lambda: np.empty(1 << 50), lambda: bytearray(TOO_MUCH)],
    ids=["torch", "numpy", "python"],
)
def test_real_failures_are_known(allocate):
    expected = pytest.raises(UserError, match=r"^there is too little memory for a cat; choose a smaller cat$")
    with expected, enough_memory("a cat", "choose a smaller cat"):
        allocate()


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 18.13 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_other_devices(error, known):
    assert is_out_of_memory(error) == known


def test_training_starts_again_with_a_smaller_part(colours, tiny_config, tmp_path, monkeypatch):
    output, settings = tmp_path / "out", dict(steps=2, evaluations=1, batch_size=8)
    with monkeypatch.context() as patched:
        patched.setattr(HfViTLayer, "forward", failing_forward)
        message = (
            r"memory for 8 images at once; choose a smaller --micro-batch-size than 8 .*start again with --resume$"
        )
        with pytest.raises(UserError, match=message):
            finetune(tiny_config(), str(colours), output, **settings)
    options = FinetuneOptions(resume=True, micro_batch_size=4)
    assert finetune(tiny_config(), str(colours), output, options=options, **settings).steps == 2


def test_training_that_has_a_checkpoint_keeps_its_settings(colours, tiny_config, tmp_path, monkeypatch):
    step, calls = HfViTTrainer.training_step, []

    def fail_later(self, *args, **kwargs):
        calls.append(1)
        return failing_forward() if len(calls) == 3 else step(self, *args, **kwargs)

    monkeypatch.setattr(HfViTTrainer, "training_step", fail_later)
    with pytest.raises(UserError, match=r"too little memory for 1 images at once; choose smaller .*another --output$"):
        finetune(
            tiny_config(),
            str(colours),
            tmp_path / "out",
            options=FinetuneOptions(micro_batch_size=1),
            steps=4,
            evaluations=4,
            batch_size=1,
        )


def test_contrast_has_no_parts(colours, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(HfViTLayer, "forward", failing_forward)
    with pytest.raises(UserError, match="for 8 images at once; choose a smaller --batch-size than 8, smaller images"):
        pretrain(tiny_config(), str(colours), tmp_path / "out", objective="contrastive", steps=1, batch_size=8)


def test_evaluation_and_analysis_name_their_batches(tiny_config, monkeypatch):
    model = HfViTForImageClassification(tiny_config()).eval()
    images = [Image.fromarray(np.zeros((8, 8, 3), np.uint8))] * 4
    monkeypatch.setattr(HfViTLayer, "forward", failing_forward)
    with pytest.raises(UserError, match="a batch of 5 images of 8x8 px; choose a smaller batch size"):
        finite_logits(model, torch.zeros(5, 3, 8, 8))
    with pytest.raises(UserError, match=r"memory for cka \(batches of 8 images, of 64 for CKA\); choose a smaller"):
        analyze((model, make_processor(model.config)), images, only=["cka"])


def test_commands_without_a_batch_end_in_one_line(command, monkeypatch):
    monkeypatch.setattr("hf_vit_cli.main.build_app", lambda: failing_forward)
    code, _, err = command("cost")
    assert code == 1
    assert err.startswith("hf-vit: there is too little memory for this; end other programs")
    assert err.count("\n") == 1
