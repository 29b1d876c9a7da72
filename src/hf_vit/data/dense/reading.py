"""Reading a source of images with masks or objects, whatever its kind."""

from typing import TYPE_CHECKING, Any

from hf_vit.data.dense.annotations import Target
from hf_vit.data.dense.coco import read_coco
from hf_vit.data.dense.columns import column_target, read_columns
from hf_vit.data.dense.mask_folder import read_mask_folder
from hf_vit.data.dense.tables import DenseTables, MaskTables
from hf_vit.data.sources.data_source import DataSource
from hf_vit.data.sources.hub_data import refuse_places
from hf_vit.data.sources.reading import NamedColumns, open_files, open_hub
from hf_vit.data.splits import SPLITS
from hf_vit.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset

_TASKS = {"label": "classification", "mask": "segmentation", "objects": "detection"}


def read_dense(source: DataSource, named: NamedColumns, target: Target | None) -> DenseTables | None:
    """Tables of a source, or None where it is one of labels.

    Args:
        source: understood.
        named: the columns that the user named.
        target: what is wanted; None for what there is.

    Raises:
        UserError: the source has something else, or there is something wrong with it.
    """
    if source.kind in ("masks", "coco"):
        has: Target = "mask" if source.kind == "masks" else "objects"
        if target not in (None, has):
            raise UserError(
                f"'{source.name}' is a folder for {_TASKS[has]} ({'images and masks' if has == 'mask' else 'COCO'}), "
                f"not for {_TASKS[target]}; choose --task {_TASKS[has]}, or give other data"
            )
        return read_mask_folder(source) if source.kind == "masks" else read_coco(source)
    if target == "label":
        return None
    if source.kind not in ("parquet", "hub"):
        if target is None:
            return None
        raise UserError(
            f"'{source.name}' ({source.kind}) has labels, but nothing for {_TASKS[target]}; give a folder as ADE20K's "
            "or COCO's, parquet files or a Hub data set with a column of masks or objects, or 'scenes'"
        )
    return _read_columns(source, named, target)


def _read_columns(source: DataSource, named: NamedColumns, target: Target | None) -> DenseTables | None:
    notes: list[str] = []
    commit: str | None = None
    read: dict[str, Any]
    if source.kind == "hub":
        read, notes, commit = open_hub(source, streaming=False)
    else:
        read = open_files(source, streaming=False)
    splits: dict[str, Dataset] = {split: read[split] for split in SPLITS if split in read}
    has = target or column_target(next(iter(splits.values())).features)
    if has == "label":
        return None
    tables = read_columns(splits, source.name, named, has, notes)
    tables.revision = commit
    for table in tables.images.values():
        refuse_places(table, "image", source)
    for table in tables.masks.values() if isinstance(tables, MaskTables) else ():
        refuse_places(table, "mask", source)
    return tables
