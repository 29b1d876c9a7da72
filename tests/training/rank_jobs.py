"""What two gloo processes do for test_processes.py, in one start of both: torchrun ... rank_jobs.py FOLDER."""

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import torch

RANK = int(os.environ.get("RANK", "0"))
# Nothing by chance, whose draws depend on the micro-batches; and no Adam, which makes steps of rounding errors.
SETTINGS = dict(
    evaluations=2, batch_size=16, optimizer="sgd", learning_rate=0.1, dropout=0.0, drop_path=0.0, mixup_alpha=0.0
)
CONTRAST = dict(steps=4, evaluations=1, batch_size=16, optimizer="sgd", learning_rate=0.1)


def tiny_config(**fields):
    from hf_vit import HfViTConfig

    sizes = dict(image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return HfViTConfig(**{**sizes, "intermediate_size": 32, "num_labels": 3, **fields})


def report(folder: Path, name: str, value) -> None:
    (folder / f"{name}-{RANK}.json").write_text(json.dumps(value))


def finetune(data: Path, output: Path, steps: int, **options):
    from hf_vit.training import FinetuneOptions
    from hf_vit.training import finetune as run

    chosen = FinetuneOptions(device="cpu", precision="fp32", **options)
    return run(tiny_config(), str(data), output, options=chosen, report=print, steps=steps, **SETTINGS)


def tables(folder: Path) -> None:
    """An epoch that ends in the middle of a batch, twice; micro-batches are accumulated."""
    result = finetune(folder / "colours", folder / "ddp", 8, micro_batch_size=4)
    report(folder, "ddp", [result.test.loss, [entry["loss"] for entry in result.history if "loss" in entry]])


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

    from hf_vit.data.transformed_stream import TransformedStream
    from hf_vit.training.trainer.streaming import SeededStream, stream_loader

    files = sorted(map(str, (folder / name).glob("*.parquet")))
    rows = load_dataset("parquet", data_files=files, streaming=True, split="train")
    stream = TransformedStream(rows, Numbers(), 4, seed=1)
    loader = stream_loader(SeededStream(stream, 5, RANK, 2), numbers, batch_size=2, num_workers=workers)
    seen = [batch.tolist() for batch, _ in zip(loader, range(batches), strict=False)]
    report(folder, f"read-{name}", seen)


class Numbers:
    """A transform of rows that are numbers: 1000 more in every epoch."""

    mixable = True

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __call__(self, batch):
        return {"pixel_values": batch["image"], "label": [label + 1000 * self.epoch for label in batch["label"]]}


def numbers(examples):
    return torch.tensor([example["label"] for example in examples])


def misfits(folder: Path) -> None:
    """Different data, and an output that only the first process looks at."""
    from hf_vit import UserError

    for name, data, output in (
        ("unequal", folder / f"colours-{RANK}", folder / "never"),
        ("full", folder / "colours", folder / "ddp"),
    ):
        try:
            finetune(data, output, 1)
        except (UserError, SystemExit) as error:
            report(folder, name, [type(error).__name__, str(error)])
    report(folder, "finished", finetune(folder / "colours", folder / "ddp", 1, resume=True).test.loss)


def contrast(folder: Path, output: Path) -> None:
    """The whole batch is the dictionary, over both processes; without a norm its parts do not know of each other."""
    from hf_vit.training import FinetuneOptions, pretrain
    from hf_vit.training.tasks.momentum_contrast import ContrastiveOptions

    options, contrastive = FinetuneOptions(device="cpu", precision="fp32"), ContrastiveOptions(normalization="none")
    settings = dict(objective="contrastive", contrastive=contrastive, options=options, **CONTRAST)
    pretrain(tiny_config(), str(folder / "colours"), output, **settings)


def noisy_student(folder: Path, output: Path) -> None:
    """Batches of 8 labelled and 16 unlabelled images, of which each process has half."""
    from hf_vit.training import FinetuneOptions, SelfTrainingOptions
    from hf_vit.training import finetune as run

    told = SelfTrainingOptions(
        folder / "ddp", str(folder / "colours-0"), unlabelled_ratio=2, confidence=0.0, head_dropout=0.0
    )
    options = FinetuneOptions(device="cpu", precision="fp32")
    settings = SETTINGS | dict(batch_size=8, evaluations=1, steps=3)
    run(tiny_config(), str(folder / "colours"), output, self_training=told, options=options, **settings)


def sharded(folder: Path) -> None:
    """FSDP2: torch's fully_shard around every block and the whole; saved whole by the first process."""
    from torch.distributed import device_mesh
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    from hf_vit import HfViTForImageClassification

    torch.manual_seed(0)
    model = HfViTForImageClassification(tiny_config())
    torch.nn.init.normal_(model.classifier.weight, std=0.1)
    mesh = device_mesh.init_device_mesh("cpu", (2,))
    for block in model.vit.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, labels = torch.load(folder / "batch.pt")
    own = slice(RANK * 4, RANK * 4 + 4)
    losses = []
    for _ in range(3):
        loss = model(images[own], labels=labels[own]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if RANK == 0:
        model.save_pretrained(folder / "fsdp2", state_dict=whole)
    parts = {str(parameter.placements) for parameter in model.parameters()}
    report(folder, "fsdp2", [losses, sorted(parts)])


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


def sharded_training(folder: Path) -> None:
    """finetune as examples/accelerate/fsdp2.yaml, interrupted and not; on CPUs, where accelerate has DDP alone."""
    from accelerate import state
    from accelerate.utils import DistributedType

    os.environ.update(FSDP2)
    torch.distributed.init_process_group("gloo")
    state.PartialState._prepare_backend = lambda *args: ("gloo", DistributedType.MULTI_GPU)
    options = dict(micro_batch_size=4, keep_checkpoints=True)
    done = finetune(folder / "colours", folder / "sharded", 8, **options)
    if RANK == 0:
        shutil.copytree(folder / "sharded" / "checkpoints", folder / "sharded-again" / "checkpoints")
        shutil.rmtree(folder / "sharded-again" / "checkpoints" / "checkpoint-8")
    torch.distributed.barrier()
    again = finetune(folder / "colours", folder / "sharded-again", 8, resume=True, **options)
    same = [torch.equal(a, b) for a, b in zip(done.model.parameters(), again.model.parameters(), strict=True)]
    report(folder, "sharded", [all(same), done.test.loss])


def main() -> None:
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["sharded"]:
        sharded_training(folder)
        return
    import datasets

    datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    with (folder / f"printed-{RANK}.txt").open("w") as printed, contextlib.redirect_stdout(printed):
        tables(folder)
        streams(folder)
        read_lanes(folder, "even", 2, 12)
        read_lanes(folder, "uneven", 2, 30)
        read_lanes(folder, "single", 2, 5)
        misfits(folder)
        contrast(folder, folder / "contrast")
        noisy_student(folder, folder / "noisy")
        sharded(folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
