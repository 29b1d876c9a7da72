"""Under which license a model may be passed on: what its card declares. Nobody's is assumed."""

from pathlib import Path

from hf_vit.errors import UserError
from hf_vit.hub.card_metadata import check_license
from hf_vit.hub.model_folder import CARD_NAME
from hf_vit.hub.published_results import hub_id
from hf_vit.repositories.reading import reading
from hf_vit.variants import looks_like_variant


def declared_license(folder: Path) -> str | None:
    """The license in the metadata of `folder/README.md`; None without card, metadata or license."""
    import yaml
    from huggingface_hub import ModelCard

    if not (folder / CARD_NAME).is_file():
        return None
    try:
        license = ModelCard.load(folder / CARD_NAME).data.get("license")
    except (ValueError, TypeError, yaml.YAMLError):  # no readable metadata: nothing is declared
        return None
    return license if isinstance(license, str) else None


def license_of(model: str) -> str | None:
    """The license of a checkpoint to start from: a folder's, or that of a repository of the Hub.

    None where none is declared, or the Hub cannot be asked.
    """
    from huggingface_hub import hf_hub_download

    if (folder := Path(model).expanduser()).is_dir():
        return declared_license(folder)
    if looks_like_variant(model) or hub_id(model) != model:
        return None
    try:
        with reading(model):
            return declared_license(Path(hf_hub_download(model, CARD_NAME)).parent)
    except UserError:
        return None


def common_license(models: list[str]) -> str | None:
    """The one license of several checkpoints; None where they differ, or one declares none."""
    licenses = {license_of(model) for model in models}
    return licenses.pop() if len(licenses) == 1 else None


def need_license(license: str | None, base: str | None) -> None:
    """Ask for a license before work that ends with sharing is begun.

    Raises:
        UserError: it is no license id; or none was given, and the checkpoint to start from declares none.
    """
    if license is not None:
        check_license(license)
    elif base is None or license_of(base) is None:
        raise UserError(NO_LICENSE)


NO_LICENSE = (
    "the license is unknown; give one, for example --license apache-2.0, mit or cc-by-4.0 (a base model's "
    "license is inherited if its card declares it)"
)
