"""The images of a run: all three splits, every image readable."""

from collections.abc import Callable

from hf_vit.data import ImageData, check_images, load_data
from hf_vit.data.annotations import Target
from hf_vit.data.overview import tell_uneven
from hf_vit.training.run.options import FinetuneOptions


def load_images(
    data: str,
    min_size: tuple[int, int],
    image_size: tuple[int, int],
    options: FinetuneOptions,
    say: Callable[[str], None],
    multi_label: bool = False,
    target: Target = "label",
) -> ImageData:
    """Load what is named, and look at every image unless it is a stream.

    Args:
        data: see `hf_vit.data.load_data`.
        min_size: (height, width) px that an image has at least: a patch.
        image_size: (height, width) px of the model.
        options: of the run.
        say: is told what was left out or done to the images.
        multi_label: whether images may have several classes each.
        target: what they bear, see `ImageData`.

    Raises:
        UserError: there are no such data, or an image cannot be read.
    """
    images = load_data(
        data,
        streaming=options.streaming,
        skip_bad_images=options.skip_bad_images,
        image_size=image_size,
        image_column=options.image_column,
        label_column=options.label_column,
        multi_label=multi_label,
        target=target,
    )
    images = check_images(images, min_size, options.skip_bad_images)
    for note in (*images.notes, *tell_uneven(images)):
        say(f"note: {note}")
    if images.skipped:
        say(f"left out {len(images.skipped)} unreadable images")
    for split in ("train", "validation", "test"):
        images.split(split)
    return images
