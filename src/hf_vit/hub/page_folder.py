"""The folder of a page, as it is read for sharing as a static Space; whoever wrote it is not trusted."""

import json
import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import RepoCard

from hf_vit.errors import UserError
from hf_vit.hub.card_metadata import check_license, metadata_errors
from hf_vit.hub.contents import Contents, SharedFile, check_secrets, check_sizes
from hf_vit.hub.licenses import NO_LICENSE
from hf_vit.hub.model_folder import CARD_NAME, PAGE_NAME, check_inside
from hf_vit.hub.preflight import check_repo_id
from hf_vit.hub.published_results import hub_id
from hf_vit.results.facts import Facts, exclusive

STATIC = ("index.html", "style.css", "page.js", "worker.js")
_RUNTIME = re.compile(r"ort[\w.-]*\.(mjs|wasm)")
_PARTS = re.compile(r"(models|examples|runtime)/.*")


def collect_page(folder: Path, *, license: str | None = None, share_images: bool = False) -> Contents:
    """Find, check and list what is shared of a page: what `hf-vit page` writes, by its place, and nothing else.

    Args:
        folder: of the page.
        license: Hub license id of what the page holds, its models; None keeps that of its README.md.
        share_images: the page's examples, images of somebody's data, may be seen by all.

    Raises:
        UserError: the folder is no page, or incomplete; it shows examples that may not be shared; no license is known.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; give the folder of a page")
    check_inside(folder, folder / PAGE_NAME)
    models, examples = _read_page(folder)
    if examples and not share_images:
        raise UserError(
            f"the page in {folder} shows {len(examples)} images of its data; give --share-images (share_images=True) "
            "to make them public, or make the page without --images"
        )
    names = [*STATIC, PAGE_NAME, *models, *examples]
    for name in [*names, CARD_NAME]:
        check_inside(folder, folder / name)
        if not (folder / name).is_file():
            raise UserError(f"the page in {folder} lacks {name}; make it again: hf-vit page")
    check_inside(folder, folder / "runtime")
    runtime = [f"runtime/{file.name}" for file in folder.glob("runtime/*") if _RUNTIME.fullmatch(file.name)]
    if not runtime:
        raise UserError(f"the page in {folder} lacks the files of its runtime; make it again: hf-vit page")
    for name in runtime:
        check_inside(folder, folder / name)
    sources: dict[str, Path | bytes] = {name: folder / name for name in (*names, *runtime)}
    sources[CARD_NAME] = _card(folder, license).encode()
    files = {name: SharedFile(name, source) for name, source in sorted(sources.items())}
    check_sizes(files.values())
    check_secrets(files.values())
    shared = {name.partition("/")[0] for name in files}
    return Contents(files, sorted(path.name for path in folder.iterdir() if path.name not in shared), _PARTS)


def state_space(folder: str | os.PathLike[str], space: str) -> None:
    """Keep with a model's latest training or conversion which Space shows it: every later card links to it.

    Args:
        folder: of the model.
        space: user/name of the Space.

    Raises:
        UserError: it cannot be a Space's name, or there is no record of a training or conversion.
    """
    check_repo_id(space)
    if hub_id(space) != space:
        raise UserError(f"the Space '{space}' lacks its owner, and the card links to it; give user/name")
    with exclusive(folder):
        facts = Facts.load(folder)
        origins = [record for record in facts.records if record.kind in ("training", "conversion")]
        if not origins:
            raise UserError(
                f"facts.json of {folder} has no training or conversion record to store --space {space} "
                "with; leave --space out"
            )
        origins[-1].values["space"] = space
        facts.save(folder)


def _read_page(folder: Path) -> tuple[list[str], list[str]]:
    """The files of its models and its examples, which page.json must name as `hf-vit page` does."""
    try:
        page: Any = json.loads((folder / PAGE_NAME).read_text(encoding="utf-8"))
        models = [f"{model['folder']}/model.onnx" for model in page["models"]]
        examples = [example["file"] for example in page["examples"]]
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no page: there is no {PAGE_NAME} in it; make one (hf-vit page MODEL --output DIR), or "
            "leave --space out to share a model"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{PAGE_NAME} of {folder} is not a page of hf-vit; make the page again: hf-vit page") from error
    numbered = [f"models/{number}/model.onnx" for number in range(len(models))]
    if not models or models != numbered or examples != [f"examples/{number}.png" for number in range(len(examples))]:
        raise UserError(f"{PAGE_NAME} of {folder} names unexpected files; make the page again: hf-vit page")
    return models, examples


def _card(folder: Path, license: str | None) -> str:
    """README.md, whose metadata make the repository a Space."""
    if license is not None:
        check_license(license)
    try:
        card = RepoCard((folder / CARD_NAME).read_text(encoding="utf-8"))
    except Exception as error:  # whatever a parser of YAML meets
        raise UserError(
            f"{CARD_NAME} of {folder} has no readable metadata; make the page again: hf-vit page"
        ) from error
    if card.data.get("sdk") != "static":
        raise UserError(
            f"{CARD_NAME} of {folder} is not a static Space's (sdk: static); make the page again: hf-vit page"
        )
    if license is not None:
        card.data.license = license  # pyright: ignore[reportAttributeAccessIssue]
    if card.data.get("license") is None:
        raise UserError(NO_LICENSE)
    if errors := metadata_errors(str(card)):
        raise UserError(f"the page's metadata would be refused by the Hub: {'; '.join(errors)}")
    return str(card)
