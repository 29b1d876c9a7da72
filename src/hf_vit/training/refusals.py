"""What several processes cannot do together: every refusal, with its reason (docs/combinations.md)."""

from dataclasses import dataclass

from hf_vit.errors import UserError


@dataclass(frozen=True)
class Refusal:
    """One line of the table.

    Attributes:
        message: what the user reads, with the names of its values in braces.
        reason: why it cannot be had.
    """

    message: str
    reason: str


REFUSALS: dict[str, Refusal] = {
    "device": Refusal(
        "{processes} processes cannot all run on --device {device}; leave it out (a GPU each), or give cpu",
        "a device named by its number is one device",
    ),
    "batch": Refusal(
        "{processes} processes do not divide the batch size {batch_size}; choose a multiple of their number",
        "each process has the same share, or their mean gradient would not be that of the batch",
    ),
    "contrastive parts": Refusal(
        "a contrastive batch of {share} images cannot be accumulated from parts of {parts}: its images are each "
        "other's negatives; leave --micro-batch-size out, or choose a smaller --batch-size",
        "the loss of a part is not a part of the loss; every process has its share at once",
    ),
    "meta pseudo labels": Refusal(
        "meta pseudo labels are learnt in one process; start it without torchrun",
        "the teacher learns from how far a whole step of the student helped, between two steps that DDP knows nothing "
        "of",
    ),
    "fsdp1": Refusal(
        "FSDP of version 1 is not supported; set fsdp_version: 2 (examples/accelerate/fsdp2.yaml)",
        "it flattens the weights: neither names nor shapes are the model's any more",
    ),
    "sam micro-batches": Refusal(
        "--sam-micro-batches needs the whole weights in every process, and FSDP divides them; leave it out, or use DDP",
        "every process climbs by its own gradient, to weights of its own",
    ),
    "checkpointing dropout": Refusal(
        "fsdp_activation_checkpointing computes every block twice, with other dropout the second time; choose "
        "--dropout 0 --drop-path 0, or set it to false",
        "accelerate (1.15) does not keep the random state (preserve_rng_state=False): gradients would be wrong in "
        "silence",
    ),
}


def refusal_of(name: str, **values: object) -> UserError:
    """The error of a line of the table, to be raised."""
    return UserError(REFUSALS[name].message.format(**values))
