"""What two gloo processes do for test_processes.py, in one start of both."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from unittest.mock import patch

import torch
from training.conftest import Images, Rows, make_resnet_config
from training.conftest import make_tiny_config as tiny_config

RANK = int(os.environ.get("RANK", "0"))
# Nothing by chance, whose draws depend on the micro-batches; and no Adam, which makes steps of rounding errors.
ON_CPU = dict(device="cpu", precision="fp32")
SETTINGS = dict(evaluations=2, batch_size=16, optimizer="sgd", learning_rate=0.1, **ON_CPU)
SETTINGS |= dict(dropout=0.0, drop_path=0.0, mixup_alpha=0.0)
# What else can be chosen: two processes, with whole weights or sharded ones, give the weights of one.
VARIANTS = {
    "average": dict(average_decay=0.5), "lora": dict(tune="lora", learning_rate=1.0), "sam": dict(sam_rho=0.05),
    "sam of parts": dict(sam_rho=0.05, sam_micro_batches=True, steps=3), "distilled": dict(layer_decay=0.7, clip=0.1),
    "cached": dict(tune="head", cache_features=True, random_resized_crop=(0, 0), horizontal_flip=0.0),
}  # fmt: skip
PRETRAINING = dict(steps=4, evaluations=4, batch_size=16, optimizer="sgd", learning_rate=0.1, **ON_CPU)
PRETRAINING |= dict(objective="contrastive")
CONTRASTS = {"contrastive": tiny_config, "contrastive, with batch norms": make_resnet_config}
STATIC_MASKS = dict(objective="masked-patch", static_masks=True, dropout=0.0, drop_path=0.0)


def report(folder: Path, name: str, value) -> None:
    (folder / f"{name}-{RANK}.json").write_text(json.dumps(value))


def finetune(data: Path, output: Path, steps: int, **options):
    from hf_vit.training import finetune as run

    return run(tiny_config(), str(data), output, report=print, steps=steps, **SETTINGS, **options)


def tables(folder: Path) -> None:
    """An epoch that ends in the middle of a batch, twice; micro-batches are accumulated."""
    result = finetune(folder / "colours", folder / "ddp", 8, micro_batch_size=4)
    report(folder, "ddp", [result.test.loss, [entry["loss"] for entry in result.history if "loss" in entry]])
    report(folder, "drawn", torch.rand(1).item())  # as dropout would be


def half_diverged(folder: Path) -> None:
    """A sweep over batch norms, of whose first rate only the second process gets a loss that is no number."""
    from transformers.utils.logging import get_verbosity

    from hf_vit.errors import UserError
    from hf_vit.training import HfViTTrainer
    from hf_vit.training import finetune as run

    learn = HfViTTrainer.compute_loss

    def explode(self, model, *args, **kwargs):
        report(folder, "verbosity", get_verbosity())
        loss = learn(self, model, *args, **kwargs)
        return loss * float("nan") if RANK == 1 and model.training and self.args.learning_rate == 0.2 else loss

    config = make_resnet_config()
    settings = SETTINGS | dict(steps=2, evaluations=1, micro_batch_size=4, process_timeout=20)
    with patch.object(HfViTTrainer, "compute_loss", explode):
        result = run(
            config,
            str(folder / "colours"),
            folder / "sweep",
            lr_sweep=(0.2, 0.1),
            **settings | dict(learning_rate=None),
        )
        try:
            run(config, str(folder / "colours"), folder / "diverged", **settings | dict(learning_rate=0.2))
        except UserError as error:
            report(folder, "diverged", str(error))
    report(folder, "sweep", [[trial["loss"] for trial in result.trials], result.validation["loss"]])


def predict(folder: Path) -> None:
    """After a training whose batch norms have seen other images in every process."""
    from transformers import TrainingArguments

    from hf_vit import HfAxialResNetForImageClassification
    from hf_vit.training import HfViTTrainer

    torch.manual_seed(0)
    model = HfAxialResNetForImageClassification(make_resnet_config())
    torch.nn.init.normal_(model.classifier.weight)
    settings = dict(max_steps=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True)
    arguments = TrainingArguments(str(folder / "predicted"), per_device_train_batch_size=4, **settings)
    trainer = HfViTTrainer(model=model, args=arguments, train_dataset=Images(16))
    trainer.train()
    report(folder, "predicted", trainer.predict(Images(16)).predictions.tolist())
    trainer.save_model()


def streams(folder: Path) -> None:
    """The smaller part is read three times while the larger one is read twice; then the same, interrupted."""
    options = dict(streaming=True, micro_batch_size=4, num_workers=2, keep_checkpoints=True)
    done = finetune(folder / "shards", folder / "stream", 6, **options)
    if RANK == 0:
        shutil.copytree(folder / "stream" / "checkpoints", folder / "resumed" / "checkpoints")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "checkpoint-6")
    again = finetune(folder / "shards", folder / "resumed", 6, resume=True, **options)
    same = [torch.equal(a, b) for a, b in zip(done.model.parameters(), again.model.parameters(), strict=True)]
    report(folder, "resumed", [all(same), done.history[-1]["epoch"], again.history[-1]["epoch"]])


def read_lanes(folder: Path, name: str, workers: int, batches: int) -> None:
    """What this process sees of shards of numbered rows."""
    from datasets import load_dataset

    from hf_vit.data.batches import TransformedStream
    from hf_vit.training.trainer.sampling import SeededStream, make_stream_loader

    files = sorted(map(str, (folder / name).glob("*.parquet")))
    rows = load_dataset("parquet", data_files=files, streaming=True, split="train")
    stream = TransformedStream(rows, Rows(), 4, seed=1)
    loader = make_stream_loader(SeededStream(stream, 5, RANK, 2), numbers, batch_size=2, num_workers=workers)
    seen = [batch.tolist() for batch, _ in zip(loader, range(batches), strict=False)]
    report(folder, f"read-{name}", seen)


def numbers(examples):
    """1000 more in every epoch."""
    return torch.tensor([1000 * epoch + row for epoch, row in (example["pixel_values"] for example in examples)])


def misfits(folder: Path) -> None:
    """Different data, and an output that only the first process looks at."""
    from hf_vit import UserError

    for name, data, output in (("unequal", f"colours-{RANK}", "never"), ("full", "colours", "ddp")):
        try:
            finetune(folder / data, folder / output, 1)
        except (UserError, SystemExit) as error:
            report(folder, name, [type(error).__name__, str(error)])
    report(folder, "finished", finetune(folder / "colours", folder / "ddp", 1, resume=True).test.loss)


def pretraining(folder: Path, output: Path, make_config=tiny_config, **options) -> None:
    """Of contrast the whole batch is the dictionary, over both processes, and what the batch norms see."""
    from hf_vit.training import pretrain

    options = PRETRAINING | options
    result = pretrain(make_config(), str(folder / "colours"), output, **options)
    losses = [[entry[name] for entry in result.history if name in entry] for name in ("eval_loss", "loss")]
    report(output.parent, output.name, losses)


def variant(folder: Path, output: Path, name: str, **options) -> None:
    """A training of 6 steps, which accumulates and ends an epoch in the middle of a batch; "of parts" does neither."""
    from hf_vit.training import DistillationOptions
    from hf_vit.training import finetune as run

    told = DistillationOptions(folder / "ddp") if name == "distilled" else None
    settings = {**SETTINGS, "steps": 6, "micro_batch_size": 8 if name == "sam of parts" else 4, **VARIANTS[name]}
    result = run(tiny_config(), str(folder / "colours"), output, distillation=told, **settings, **options)
    losses = [entry["loss"] for entry in result.history if "loss" in entry]
    report(output.parent, output.name, [result.test.loss, losses])


def noisy_student(folder: Path, output: Path) -> None:
    """Batches of 8 labelled and 16 unlabelled images, of which each process has half."""
    from hf_vit.training import SelfTrainingOptions
    from hf_vit.training import finetune as run

    told = SelfTrainingOptions(
        folder / "ddp", str(folder / "colours-0"), unlabelled_ratio=2, confidence=0.0, head_dropout=0.0
    )
    settings = SETTINGS | dict(batch_size=8, evaluations=1, steps=3)
    run(tiny_config(), str(folder / "colours"), output, self_training=told, **settings)


FSDP2 = dict(
    ACCELERATE_TORCH_DEVICE="cpu",
    ACCELERATE_USE_FSDP="true",
    FSDP_VERSION="2",
    FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
    FSDP_TRANSFORMER_CLS_TO_WRAP="HfViTLayer",
    FSDP_STATE_DICT_TYPE="FULL_STATE_DICT",
    FSDP_CPU_RAM_EFFICIENT_LOADING="false",
    FSDP_RESHARD_AFTER_FORWARD="true",
)


def sharded_training(folder: Path, kind: str, names: list[str], **environment: str) -> None:
    """finetune as examples/accelerate/fsdp2.yaml, unbroken and resumed; on CPUs, where accelerate has DDP alone."""
    from accelerate import state
    from accelerate.utils import DistributedType

    os.environ.update({**FSDP2, "FSDP_STATE_DICT_TYPE": kind, **environment})
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
    for name in names:
        output = folder / f"{kind} {name}"
        if name == "contrastive":
            pretraining(folder, output)
            continue
        variant(folder, output, name, keep_checkpoints=True)
        for last, again in (("checkpoint-6", "resumed"), ("finished", "ended")):
            work = folder / f"{kind} {name} {again}" / "checkpoints"
            if RANK == 0:
                shutil.copytree(output / "checkpoints", work)
                shutil.rmtree(work / last)
            torch.distributed.barrier()
            variant(folder, work.parent, name, keep_checkpoints=True, resume=True)


def full_disk(folder: Path) -> None:
    """The second process cannot write its random state: /dev/full is a disk without space."""
    from transformers import Trainer

    from hf_vit import UserError

    save = Trainer._save_rng_state

    def save_on_full(trainer, output):
        Path(output).mkdir(parents=True, exist_ok=True)
        file = Path(output) / "rng_state_1.pth"
        file.symlink_to("/dev/full")
        try:
            save(trainer, output)
        finally:  # which has no end, for who reads it
            file.unlink()
            file.touch()

    if RANK == 1:
        Trainer._save_rng_state = save_on_full
    try:
        finetune(folder / "colours", folder / "full disk", 4, process_timeout=20)
    except UserError as error:
        report(folder, "full-disk", str(error))
        if RANK == 1:
            os._exit(0)  # as a process that has failed; torchrun would end the first at once


def all_sharded(place: str) -> None:
    """The sharded trainings that take minutes."""
    folder = Path(place)
    torch.distributed.init_process_group("gloo")
    sharded_training(folder, "FULL_STATE_DICT", ["average", "lora", "sam", "distilled", "contrastive"])
    twice = dict(FSDP_ACTIVATION_CHECKPOINTING="true", ACCELERATE_DYNAMO_BACKEND="AOT_EAGER")
    sharded_training(folder, "SHARDED_STATE_DICT", ["lora", "distilled"], **twice)
    torch.distributed.destroy_process_group()


def start(place: str, name: str):
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    return contextlib.redirect_stdout((Path(place) / f"{name}-{RANK}.txt").open("w", buffering=1))


def do_first(place: str) -> None:
    """The two-process training of every test run; do_all goes on in its folder."""
    with start(place, "printed"):
        tables(Path(place))
        misfits(Path(place))
        half_diverged(Path(place))
        predict(Path(place))
        pretraining(Path(place), Path(place) / "masked-patch", **STATIC_MASKS)


def do_all(place: str) -> None:
    from hf_vit import UserError

    folder = Path(place)
    with start(place, "printed-later"):
        streams(folder)
        read_lanes(folder, "even", 2, 12)
        read_lanes(folder, "uneven", 2, 30)
        read_lanes(folder, "single", 2, 5)
        for name, make_config in CONTRASTS.items():
            pretraining(folder, folder / name, make_config)
        noisy_student(folder, folder / "noisy")
        for name in VARIANTS:
            variant(folder, folder / name, name)
        sharded_training(folder, "SHARDED_STATE_DICT", ["average"])
        try:
            variant(folder, folder / "refused", "sam of parts")
        except UserError as error:
            steps = [path.name for path in (folder / "refused").glob("**/checkpoint-*")]
            report(folder, "refused", [str(error), steps])
        full_disk(folder)
    os._exit(0)  # the other process is gone
