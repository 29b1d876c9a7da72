"""Whatever is wrong is told in one line, with a non-zero exit, before any training starts."""

import errno
import gc
import os
import re
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from data.conftest import make_tar
from PIL import Image
from safetensors import SafetensorError
from training.conftest import COLOURS, harm, write_tar

from hf_vit import HfViTConfig, HfViTForImageClassification, UserError
from hf_vit.analysis import analyze
from hf_vit.data import make_processor
from hf_vit.errors import explain_refusal, is_out_of_memory, report_full_memory
from hf_vit.models.modeling_hf_vit import HfViTLayer
from hf_vit.training import HfViTTrainer, finetune, pretrain
from hf_vit.training.run import find_last_complete, is_complete, require_space

ONE_STEP = ("--steps", "1", "--evaluations", "1", "--batch-size", "4")


@pytest.fixture
def refused(command, tmp_path, colours, monkeypatch):
    """Run finetune with good arguments but for those given: the one line it is refused with."""
    trained = []
    monkeypatch.setattr(HfViTTrainer, "train", lambda self, **kwargs: trained.append(self))

    def run(*arguments, untouched=True, **options):
        given = {"model": "Ti/4", "data": colours, "output": tmp_path / "out", "image-size": "8", **options}
        flags = [part for name, value in given.items() for part in (f"--{name}", value)]
        code, out, err = command("finetune", *flags, *ONE_STEP, *arguments)
        assert code != 0
        assert not trained
        assert err.count("\n") == 1, err
        assert err.startswith("hf-vit: ")
        assert "Traceback" not in out
        if untouched:
            assert not (tmp_path / "out").exists()
        return err

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--learning-rate", "nan"), "--learning-rate nan is not a finite number"),
        (("--micro-batch-size", "0"), "micro_batch_size = 0: Input should be greater than 0"),
        (("--micro-batch-size", "3"), "3 does not divide the batch size 4"),
        (("--micro-batch-size", "1", "--mixup-alpha", "0.2"), "different images of a micro-batch, but its size is 1;"),
        (("--recipe", "vit5", "--micro-batch-size", "2"), "its size is 2; choose a size above 3"),
        (("--precision", "fp8"), "precision = 'fp8': Input should be 'auto', 'fp32' or 'bf16'"),
        (("--image-size", "x8"), "--image-size 'x8' is not a size"),
        (("--image-size", "0"), "--image-size '0' is not a size"),
        (("--image-size", "2"), "Ti/4 cannot be built with these settings: image_size=2 does not fit patch_size=4"),
        (("--device", "nonsense"), "device 'nonsense' cannot be used"),
        (("--recipe", "default-smal"), "the recipe 'default-smal' is unknown; did you mean default-small"),
        (("--model", "Tu/16"), "the variant 'Tu/16' is unknown.*Ti/16"),
        (("--model", "nothing"), "the variant 'nothing' is unknown"),
        (("--model", "nobody/nothing"), "no folder or variant nobody/nothing, and it cannot be loaded from the Hub: "),
        (("--data", "no-such-folder-here"), "no-such-folder-here"),
        (("--data", "digits", "--repeated-augmentation", "3", "--streaming"), "a stream gives every image once"),
        (("--random-crop", "16", "--image-size", "16"), "--random-crop 16 is too large for"),
        (("--distillation", "soft"), "--distillation only works with --teacher"),
        (("--streaming", "--class-weights"), "classes cannot be balanced while streaming; leave --streaming"),
        (("--teacher", "no/such/teacher/here"), "there is no file or folder no/such/teacher/here"),
        (("--teacher", "timm:no_such_model"), "timm:no_such_model cannot be loaded"),
        (("--teacher", "TINY", "--data", "digits"), "teacher tiny cannot be used: the data has classes that the"),
    ],
)
def test_bad_values(arguments, message, refused, tiny_checkpoint):
    assert re.search(message, refused(*(tiny_checkpoint if word == "TINY" else word for word in arguments)))


def test_a_model_of_gray_images_is_refused_before_data_are_read(tmp_path):
    with pytest.raises(UserError, match="takes images with num_channels=1; give a model for RGB images"):
        finetune(HfViTConfig(num_channels=1), tmp_path / "nothing", tmp_path / "out")


def test_data_that_cannot_be_trained_on(refused, make_colours, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(data=tmp_path / "empty")

    alone = make_colours(tmp_path / "alone")
    (alone / "lonely").mkdir()
    shutil.copy(alone / "red" / "00.png", alone / "lonely")
    assert "class 'lonely' has 1 image" in refused(data=alone)

    corrupt = make_colours(tmp_path / "corrupt")
    (corrupt / "red" / "03.png").write_bytes(b"\x89PNG no more")
    assert "03.png" in refused(data=corrupt)

    small = make_colours(tmp_path / "small")
    Image.new("RGB", (3, 12)).save(small / "blue" / "07.png")
    assert "07.png" in (message := refused(data=small))
    assert "12x3 px, smaller than one patch of 4x4 px" in message


@pytest.mark.filterwarnings("ignore:images of 10x10 px hold 2x2 whole patches:UserWarning")
def test_an_image_size_that_leaves_pixels_over(command, colours, tmp_path):
    """The model is made for 2x2 patches of 4 px, and for images of 10 px, of which it sees 8."""
    arguments = ("--model", "Ti/4", "--data", colours, "--output", tmp_path / "out", "--image-size", "10", *ONE_STEP)
    assert command("finetune", *arguments)[0] == 0
    model = HfViTForImageClassification.from_pretrained(tmp_path / "out")
    assert (model.config.image_size, model.config.grid) == (10, (2, 2))
    images = torch.rand(2, 3, 10, 10)
    assert torch.equal(model(images).logits, model(images[:, :, :8, :8]).logits)


def test_damaged_checkpoints(refused, tiny_config, tmp_path):
    for name, change, said in (
        ("config.json", None, "no config.json"),
        ("model.safetensors", "half", "weights of"),
        ("model.safetensors", None, "no file named model.safetensors"),
        ("config.json", {"num_hidden_layers": 3}, "vit.layers.2"),
        ("config.json", {"num_hidden_layers": "three"}, "config.json"),
        ("config.json", "{", "valid JSON"),
        ("config.json", "{}", "checkpoint of another architecture ('unknown')"),
    ):
        HfViTForImageClassification(tiny_config()).save_pretrained(tmp_path / "model")
        harm(tmp_path / "model", name, change)
        assert said in refused(model=tmp_path / "model")


def test_output_that_holds_something_else(refused, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("the only copy")
    message = refused(untouched=False)
    assert "holds other files (thesis.txt)" in message
    assert "holds other files" in refused("--resume", untouched=False)
    assert [path.name for path in output.iterdir()] == ["thesis.txt"]
    (output / "thesis.txt").unlink()
    output.rmdir()
    output.write_text("a file")
    assert "is a file" in refused(untouched=False)


def test_full_disk_is_told_beforehand(refused, monkeypatch, tmp_path):
    """The space that is needed is counted in whole."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * 2**20))
    message = refused()
    assert "has 5.0 MiB free, but the training needs about" in message
    assert message.endswith("; free some space, or choose another --output\n")  # bench data has no --output
    require_space(tmp_path / "not" / "yet" / "there", 5 * 2**20)
    with pytest.raises(UserError, match="free some space"):
        require_space(tmp_path / "not" / "yet" / "there", 5 * 2**20 + 1)


# As they were seen on a disk that was really full: of Python, safetensors and torch.save.
FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 1179392 vs 1179280"),
    RuntimeError("basic_ios::clear: iostream error"),
]


@pytest.mark.parametrize("error", FULL)
def test_errors_of_a_full_disk_are_known(error):
    said = "(space|disk is full).*; free some space there, or choose a folder on another disk$"
    assert re.search(said, explain_refusal(error))
    assert explain_refusal(error, elsewhere=False).endswith("; free some space there")
    assert explain_refusal(type(error)("something else")) is None


# What is said of others, tests/results/test_writing.py asks.
@pytest.mark.parametrize("error", [FULL[2], OSError(errno.EROFS, os.strerror(errno.EROFS))], ids=str)
def test_disk_that_refuses_a_checkpoint(error, colours, tiny_config, tmp_path, monkeypatch):
    """The first checkpoint stays, the half second goes, and --resume ends the run."""
    output, settings = tmp_path / "out", dict(steps=4, evaluations=2, batch_size=8)
    save = HfViTTrainer._save_optimizer_and_scheduler

    def save_once(self, folder):
        if not folder.endswith("-2"):
            raise error
        save(self, folder)

    with monkeypatch.context() as patched:
        patched.setattr(HfViTTrainer, "_save_optimizer_and_scheduler", save_once)
        reason = getattr(error, "strerror", None) or ".* the disk is full; free some space there"
        message = rf"out cannot be written: {reason}.*, then continue from checkpoint-2 with --resume$"
        with pytest.raises(UserError, match=message):
            finetune(tiny_config(), str(colours), output, **settings)
    assert [path.name for path in output.iterdir()] == ["checkpoints"]
    kept = ["checkpoint-2", "data_files.json", "run.json"]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == kept
    assert is_complete(output / "checkpoints" / "checkpoint-2")
    result = finetune(tiny_config(), str(colours), output, resume=True, **settings)
    assert result.steps == 4


def test_disk_that_fills_up_with_the_finished_model(colours, tiny_config, tmp_path, monkeypatch):
    output, settings = tmp_path / "out", dict(steps=1, evaluations=1, batch_size=8)
    with monkeypatch.context() as patched:
        patched.setattr("hf_vit.training.run.write_card", Mock(side_effect=FULL[1]))
        with pytest.raises(UserError, match=r"free some space there, then continue with --resume \(the checkpoints"):
            finetune(tiny_config(), str(colours), output, **settings)
    assert [path.name for path in output.iterdir()] == ["checkpoints"]
    assert find_last_complete(output / "checkpoints").name == "checkpoint-1"
    finetune(tiny_config(), str(colours), output, resume=True, **settings)
    assert (output / "config.json").exists()


# datasets leaves the archive open when its reader is given up after an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_of_a_stream_is_one_line(workers, command, make_colours, tmp_path):
    (tmp_path / "data").mkdir()
    folder = make_colours(tmp_path / "images", count=12)
    (folder / "red" / "03.png").write_bytes(b"not an image")
    write_tar(tmp_path / "data" / "train.tar", sorted(folder.glob("*/*.png")))
    arguments = ("--model", "Ti/4", "--data", tmp_path / "data", "--output", tmp_path / "out", "--image-size", "8")
    code, _, err = command("finetune", *arguments, *ONE_STEP, "--streaming", "--num-workers", workers)
    assert (code, err.count("\n")) == (1, 1), err
    assert "is not an image" in err
    gc.collect()


def test_a_stream_without_a_test_image_is_refused_before_the_training(refused, tmp_path):
    """Two images whose hashes are none of the tenth that is cut off for the test."""
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        colours = ((b"P6 8 8 255\n" + bytes(color) * 64, b"%d" % label) for label, color in enumerate(COLOURS.values()))
        samples = [{"ppm": image, "cls": label} for image, label in colours]
        make_tar(tmp_path / "data" / f"{split}.tar", samples)
    message = "the stream data has no test image; give more images, or leave --streaming out\n"
    assert message in refused("--streaming", data=tmp_path / "data")


TOO_MUCH = 1 << 52  # bytes


def failing_forward(*args, **kwargs):
    """A real failure of torch's allocator."""
    return torch.empty(TOO_MUCH, dtype=torch.uint8)


@pytest.mark.parametrize("allocate", [failing_forward, lambda: np.empty(1 << 50), lambda: bytearray(TOO_MUCH)])
def test_real_failures_are_known(allocate):
    expected = pytest.raises(UserError, match=r"^out of memory for a cat; choose a smaller cat$")
    with expected, report_full_memory("a cat", "choose a smaller cat"):
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
        message = "for 8 images at once; choose a smaller --micro-batch-size than 8 .*start again with --resume$"
        with pytest.raises(UserError, match=message):
            finetune(tiny_config(), str(colours), output, **settings)
    assert finetune(tiny_config(), str(colours), output, resume=True, micro_batch_size=4, **settings).steps == 2


def test_training_that_has_a_checkpoint_keeps_its_settings(colours, tiny_config, tmp_path, stop_at):
    stop_at(3, failing_forward)
    with pytest.raises(UserError, match=r"out of memory for 1 image at once; choose smaller .*another --output$"):
        finetune(
            tiny_config(), str(colours), tmp_path / "out", steps=4, evaluations=4, batch_size=1, micro_batch_size=1
        )


def test_contrast_has_no_parts(colours, tiny_config, tmp_path, monkeypatch):
    monkeypatch.setattr(HfViTLayer, "forward", failing_forward)
    with pytest.raises(UserError, match="for 8 images at once; choose a smaller --batch-size than 8, smaller images"):
        pretrain(tiny_config(), str(colours), tmp_path / "out", objective="contrastive", steps=1, batch_size=8)


def test_an_analysis_names_its_batches(tiny_config, monkeypatch):
    """Of evaluations tests/evaluation/test_features.py asks."""
    model = HfViTForImageClassification(tiny_config()).eval()
    images = [Image.fromarray(np.zeros((8, 8, 3), np.uint8))] * 4
    monkeypatch.setattr(HfViTLayer, "forward", failing_forward)
    with pytest.raises(UserError, match=r"memory for cka \(batches of 8 images, of 64 for CKA\); choose a smaller"):
        analyze((model, make_processor(model.config)), images, only=["cka"])


def test_commands_without_a_batch_end_in_one_line(fails, monkeypatch):
    monkeypatch.setattr("hf_vit_cli.main.build_app", lambda: failing_forward)
    fails(("cost",), "hf-vit: the memory is full; close other programs")
