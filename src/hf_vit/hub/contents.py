"""Collect the files of a model or page that are shared: only those that hf_vit writes.

The author of the folder is not trusted: links must not lead out of it, and tokens and images of the data are not
shared.
"""

import hashlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata, resources
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from huggingface_hub import RepoCard
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import yaml_dump

from hf_vit.environment import list_versions
from hf_vit.errors import UserError
from hf_vit.hub.card import is_rendered, render_card
from hf_vit.hub.card_metadata import (
    NO_LICENSE,
    check_license,
    find_metadata_errors,
    load_facts,
    parse_license,
    read_license,
    select_comparable,
)
from hf_vit.hub.card_sections import shows_images
from hf_vit.hub.handler import TASKS
from hf_vit.hub.model_folder import (
    CARD_NAME,
    INDEX,
    PAGE_NAME,
    PROCESSOR,
    SINGLE,
    WHOLE_PROCESSOR,
    ModelConfig,
    check_inside,
    count_parameters,
    list_code,
    list_examples,
    list_weights,
    read_config,
)
from hf_vit.hub.published_results import RESULTS_FILE, make_results_file
from hf_vit.repositories.reading import check_file_name, refuse_pointer
from hf_vit.results.facts import FACTS_NAME, Facts
from hf_vit.results.redaction import find_secret, redact_text

# The Hub's limits for one file in bytes (https://huggingface.co/docs/hub/storage-limits): in git, and in its storage.
MAX_TEXT_BYTES = 10 * 1024**2
MAX_FILE_BYTES = 50 * 1000**3
PAGE_FILES = ("index.html", "style.css", "page.js", "worker.js")
# Files of earlier pushes that are deleted: weights in every format that from_pretrained reads, files that transformers
# prefers to preprocessor_config.json and to config.json, and parts of a page.
_REPLACED = re.compile(
    r"(?!openvino_)[^/]+\.(safetensors|bin|h5|msgpack|pt|pth|ckpt|pkl)(\.index\.json)?|(processor|adapter)_config\.json"
)
_PAGE_PARTS = re.compile(r"(models|examples|runtime)/.*")
# The field of config.json in which transformers 4 keeps from where the model was loaded, often a local path.
_LOADED_FROM = re.compile(rb'\s*("_name_or_path":\s*"(\\.|[^"\\])*",|,\s*"_name_or_path":\s*"(\\.|[^"\\])*")')
_GPS = 0x8825  # number of the EXIF tag that holds the GPS data
# For Inference Endpoints: code that serves the model, and what it needs.
HANDLER, REQUIREMENTS = "handler.py", "requirements.txt"
_SIGNATURE = b" SHA-256 of all above: "  # in the handler's last line
_SERVED_BY = ("torch", "torchvision", "transformers", "safetensors", "numpy")
_PICTURE = re.compile(r"\.(png|jpe?g|svg|gif|webp|avif|bmp|tiff?)$", re.IGNORECASE)
_RUNTIME = re.compile(r"ort[\w.-]*\.(mjs|wasm)")
_Sources = dict[str, Path | bytes]


@dataclass(frozen=True)
class SharedFile:
    """One file of a push: its path in the repository, and its bytes or the local file that holds them."""

    path: str
    source: Path | bytes

    def open(self) -> BinaryIO:
        """Return the content as a binary file object."""
        return io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")

    @property
    def size(self) -> int:
        """Return the size in bytes."""
        return len(self.source) if isinstance(self.source, bytes) else self.source.stat().st_size

    @property
    def is_text(self) -> bool:
        """Return whether git stores this file if it is small; other files go to the Hub's storage."""
        return self.path.endswith((".json", ".md", ".py", ".txt", ".svg", ".yaml", ".html", ".css", ".js", ".mjs"))

    @property
    def readable_text(self) -> str:
        """Return the bytes that may contain text, decoded as Latin-1: the file, or a weight file's header."""
        with self.open() as file:
            size = int.from_bytes(file.read(8), "little") if self.path.endswith(".safetensors") else -1
            return file.read(size).decode("latin-1")

    @cached_property
    def sha256(self) -> str:
        """Return the SHA-256 by which the Hub identifies files in its storage."""
        return self._hash(hashlib.sha256())

    @cached_property
    def git_oid(self) -> str:
        """Return git's blob hash, by which the Hub identifies small text files."""
        return self._hash(hashlib.sha1(b"blob %d\0" % self.size))

    def _hash(self, hasher: "hashlib._Hash") -> str:
        with self.open() as file:
            return hashlib.file_digest(file, lambda: hasher).hexdigest()  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Contents:
    """Everything that one push sends; `skipped` names are not shared, matching paths of earlier pushes are deleted."""

    files: dict[str, SharedFile]
    skipped: list[str]
    replaced_pattern: re.Pattern[str]

    @property
    def size(self) -> int:
        """Return the size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    @property
    def card(self) -> str:
        """Return the text of README.md."""
        with self.files[CARD_NAME].open() as file:
            return file.read().decode()

    def with_files(self, files: Mapping[str, bytes]) -> "Contents":
        """Return a copy in which some files have other content."""
        return replace(self, files=self.files | {path: SharedFile(path, data) for path, data in files.items()})

    def find_stale(self, remote: Iterable[str]) -> list[str]:
        """Return the files of earlier pushes that must be deleted: old weights, records, results and model code.

        from_pretrained prefers a single weight file to shards, so a file left behind would load the old model.
        """
        names = {path.name for path in resources.files("hf_vit.models").iterdir() if "_hf_" in path.name}
        names |= {RESULTS_FILE, FACTS_NAME}
        stale = [path for path in remote if path in names or self.replaced_pattern.fullmatch(path)]
        return sorted(set(stale) - self.files.keys())

    def without_handler(self, remote: Mapping[str, RepoFile], read: Callable[[str], bytes]) -> "Contents":
        """Return a copy without this package's handler, if the owner of the repository wrote one there.

        `read` returns the content of one of the `remote` files.
        """
        ours = {path: file for path, file in self.files.items() if path == HANDLER and isinstance(file.source, bytes)}
        if HANDLER not in remote or not find_differences(ours, remote) or _is_ours(read(HANDLER)):
            return self
        others = self.files.keys() - {HANDLER, REQUIREMENTS}
        return replace(self, files={path: file for path, file in self.files.items() if path in others})


def find_differences(local: Mapping[str, SharedFile], remote: Mapping[str, RepoFile]) -> list[str]:
    """Return the paths that are missing remotely or have another hash (SHA-256 in storage, else git's)."""

    def is_same(file: SharedFile) -> bool:
        entry = remote.get(file.path)
        if entry is None or entry.lfs is None:
            return entry is not None and entry.blob_id == file.git_oid
        return entry.lfs.sha256 == file.sha256

    return [path for path, file in local.items() if not is_same(file)]


def collect(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    scratch: Path,
    license: str | None = None,
    max_shard_size: int | str = "5GB",
    share_images: bool = False,
) -> Contents:
    """Return the files of a model folder to share, after checking them; the folder is not changed.

    Weights larger than `max_shard_size` ("5GB", or bytes) are split in the empty folder `scratch`; see `push_to_hub`.

    Raises:
        UserError: a required file is missing, damaged, too large, outside the folder, or contains a token.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist; give the folder of a saved model (--output of finetune)")
    for name in ("config.json", PROCESSOR, WHOLE_PROCESSOR, FACTS_NAME, CARD_NAME, SINGLE, INDEX, HANDLER):
        check_inside(folder, folder / name)  # before any file is read
    config = read_config(folder)
    sources = collect_weights(folder, scratch, max_shard_size)
    names = {"config.json", PROCESSOR, *list_code(folder, config)}
    if not (folder / PROCESSOR).is_file():
        raise UserError(f"{folder} holds no image processor ({PROCESSOR}); add it with processor.save_pretrained")
    descriptions = describe_model(folder, repo_id, license=license, share_images=share_images)
    images = {*list_plots(folder, descriptions[CARD_NAME].decode()), *list_examples(folder)}
    for name in sorted(images):
        _refuse_gps(folder, name)
    names |= images
    others = folder / FACTS_NAME, folder / WHOLE_PROCESSOR, *folder.glob("LICENSE*")
    names |= {path.name for path in others if path.is_file()}
    sources |= {name: folder / name for name in names - descriptions.keys()} | descriptions
    sources["config.json"] = _LOADED_FROM.sub(b"", (folder / "config.json").read_bytes())
    if FACTS_NAME in names and find_secret((folder / FACTS_NAME).read_text(encoding="utf-8")) is None:
        sources[FACTS_NAME] = Facts.load(folder).to_json().encode()  # older versions redacted less
    sources |= collect_serving_files(folder, config)
    return _check_contents(folder, sources, _REPLACED, {SINGLE, INDEX})


def collect_serving_files(folder: Path, config: ModelConfig) -> _Sources:
    """Return `handler.py` and `requirements.txt`: this package's, or those of a folder with a handler of its own.

    An unchanged handler of another version of this package, as in a downloaded folder, is replaced.
    """
    ours = make_serving_files(config)
    has_handler = (folder / HANDLER).is_file() and not _is_ours((folder / HANDLER).read_bytes())
    own = {name: folder / name for name in (HANDLER, REQUIREMENTS) if has_handler and (folder / name).is_file()}
    return ours | own


def make_serving_files(config: ModelConfig) -> dict[str, bytes]:
    """Return this package's handler and what it needs; nothing for a model of another library without a known head.

    The handler ends with a digest of the code above, by which `_is_ours` recognizes it.
    """
    heads = [name.removeprefix("AutoModel") for name in TASKS]
    if not (config.is_ours or any(head in config.architecture for head in heads)):
        return {}
    requirements: list[str] = []
    with suppress(metadata.PackageNotFoundError):
        requirements = metadata.requires("hf-vit") or []
    # Lines of pyproject.toml such as "torch>=2.6"; those of an extra have a condition after a semicolon.
    lines = [line for line in requirements if re.split(r"[^\w-]", line)[0] in _SERVED_BY and ";" not in line]
    lines += ["pillow", *(["scipy"] if "Mask2Former" in config.architecture else [])]
    quantization = str(config.quantization_config)
    lines += [library for library in ("torchao", "bitsandbytes") if library in quantization]
    code = resources.files("hf_vit.hub").joinpath(HANDLER).read_bytes()
    code += f"\n# Written by hf-vit {list_versions().get('hf-vit')}.".encode()
    code += _SIGNATURE + hashlib.sha256(code).hexdigest().encode() + b"\n"
    return {HANDLER: code, REQUIREMENTS: ("\n".join(sorted(lines)) + "\n").encode()}


def _is_ours(code: bytes) -> bool:
    """Return whether some version of this package wrote a handler, and nobody changed it since."""
    above, signature, digest = code.rpartition(_SIGNATURE)
    return bool(signature) and digest.strip() == hashlib.sha256(above).hexdigest().encode()


def _refuse_gps(folder: Path, name: str) -> None:
    """Raise a UserError for an image with GPS data, as photographs of phones have."""
    from PIL import Image

    check_inside(folder, folder / name)
    place: object = None
    with suppress(Exception), Image.open(folder / name) as image:  # a file that is not an image has no GPS data
        place = image.getexif().get_ifd(_GPS) or "GPSLatitude" in str(image.info)  # XMP is text
    if place:
        raise UserError(f"{name} of {folder} contains the place where it was taken (GPS in EXIF or XMP); remove it")


def collect_page(folder: Path, *, license: str | None = None, share_images: bool = False) -> Contents:
    """Return the files of a page to share, after checking them; only files that `hf-vit page` writes are included.

    Raises:
        UserError: a file is missing, damaged, too large or outside the folder, or contains a token.
    """
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist; give the folder of a page, the --output of hf-vit page")
    remedy = f"make the page again with hf-vit page MODEL --output {shlex.quote(str(folder))}"
    check_inside(folder, folder / PAGE_NAME)
    try:
        page: Any = json.loads((folder / PAGE_NAME).read_text(encoding="utf-8"))
        models = [f"{model['folder']}/model.onnx" for model in page["models"]]
        examples = [example["file"] for example in page["examples"]]
    except FileNotFoundError as error:
        problem = f"{folder} holds no page ({PAGE_NAME} is missing)"
        raise UserError(f"{problem}; make one with hf-vit page, or leave --space out to share a model") from error
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{PAGE_NAME} of {folder} was not written by hf-vit page; {remedy}") from error
    expected_models = [f"models/{number}/model.onnx" for number in range(len(models))]
    expected_examples = [f"examples/{number}.png" for number in range(len(examples))]
    if not models or models != expected_models or examples != expected_examples:
        raise UserError(f"{PAGE_NAME} of {folder} does not list the files that a page has; {remedy}")
    if examples and not share_images:
        problem = f"the page in {folder} shows {len(examples)} images of its data set"
        raise UserError(f"{problem}; add --share-images to make them public, or make the page without --images")
    names = [*PAGE_FILES, PAGE_NAME, *models, *examples]
    for name in [*names, CARD_NAME]:
        check_inside(folder, folder / name)
        if not (folder / name).is_file():
            raise UserError(f"the page in {folder} lacks the file {name}; {remedy}")
    check_inside(folder, folder / "runtime")
    runtime = [f"runtime/{file.name}" for file in folder.glob("runtime/*") if _RUNTIME.fullmatch(file.name)]
    if not runtime:
        raise UserError(f"the page in {folder} lacks the files of ONNX Runtime Web; {remedy}")
    sources: _Sources = {name: folder / name for name in (*names, *runtime)}
    return _check_contents(folder, sources | {CARD_NAME: _make_page_card(folder, license, remedy)}, _PAGE_PARTS)


def _make_page_card(folder: Path, license: str | None, remedy: str) -> bytes:
    """Return README.md of the page, whose metadata makes the repository a static Space."""
    try:
        card = RepoCard((folder / CARD_NAME).read_text(encoding="utf-8"))
    except Exception as error:  # YAML parsers raise many classes
        raise UserError(f"{CARD_NAME} of {folder} has no readable metadata; {remedy}") from error
    if card.data.get("sdk") != "static":
        raise UserError(f"{CARD_NAME} of {folder} is not the card of a static Space (sdk: static); {remedy}")
    if license is not None:
        check_license(license)
        for name in ("license_name", "license_link") if license != "other" else ():
            card.data.pop(name)
        card.data.license = license  # pyright: ignore[reportAttributeAccessIssue]
    if card.data.get("license") is None:
        raise UserError(NO_LICENSE)
    _check_metadata(str(card))
    return str(card).encode()


def _check_metadata(card: str) -> None:
    if errors := find_metadata_errors(card):
        raise UserError(f"the Hub would refuse the card's metadata: {'; '.join(errors)}; correct {CARD_NAME}")


def collect_gradio(folder: Path, repo_id: str, **options: Any) -> Contents:
    """Return the files of a Gradio Space: a model, its code and this package's handler, an app, and a card."""
    model = collect(folder, repo_id, **options)
    app_files = make_serving_files(read_config(folder))
    if not app_files:
        raise UserError(f"the app cannot show the model in {folder}; give a classifier, segmenter or detector")
    title = folder.resolve().name
    settings = {"title": title, "sdk": "gradio", "app_file": "app.py", "python_version": "3.11"}
    text = "Runs the model in this repository, written by `hf-vit push --space gradio`."
    app_files |= {
        "app.py": resources.files("hf_vit.hub").joinpath("gradio_app.txt").read_bytes(),
        CARD_NAME: f"---\n{yaml_dump(settings | parse_license(model.card))}---\n\n{text}\n".encode(),
        REQUIREMENTS: app_files[REQUIREMENTS] + b"gradio\n",
    }
    pattern = re.compile(rf"LICENSE.*|((pre)?processor_)?config\.json|{re.escape(INDEX)}|.*\.(safetensors|py)")
    model_files = {path: file for path, file in model.files.items() if pattern.fullmatch(path)}
    return replace(model, files=model_files).with_files(app_files)


def _check_contents(
    folder: Path, sources: _Sources, replaced_pattern: re.Pattern[str], handled_names: Iterable[str] = ()
) -> Contents:
    """Return the files of a folder as `Contents`, after checking sizes, links and tokens.

    The names in `handled_names` are not reported as skipped.
    """
    for name, source in sources.items():
        if source == folder / name:
            check_inside(folder, folder / name)
    files = {name: SharedFile(name, source) for name, source in sorted(sources.items())}
    for file in files.values():
        size, limit = file.size, MAX_TEXT_BYTES if file.is_text else MAX_FILE_BYTES
        if size > limit:
            raise UserError(f"{file.path} has {size:,} bytes, but the Hub takes at most {limit:,}; make it smaller")
        if find_secret(file.path) is not None:
            name = redact_text(file.path)
            raise UserError(f"the name of the file {name} looks like a token; rename it, and revoke it if shared")
    for file in files.values():
        token_kind = find_secret(file.readable_text)
        if token_kind is not None:
            raise UserError(f"{file.path} holds what looks like {token_kind}; remove it, and revoke it if shared")
    known_names = {*(name.partition("/")[0] for name in files), *handled_names}
    skipped_names = sorted(path.name for path in folder.iterdir() if path.name not in known_names)
    return Contents(files, skipped_names, replaced_pattern)


def collect_weights(folder: Path, scratch: Path, max_shard_size: int | str) -> _Sources:
    """Return the weight files; one larger than `max_shard_size` is split into shards in `scratch`."""
    from huggingface_hub import save_torch_state_dict
    from huggingface_hub.serialization._base import parse_size_to_int
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights = folder / SINGLE
    if weights.is_file() and (folder / INDEX).is_file():
        raise UserError(f"{folder} holds both {SINGLE} and {INDEX}, of which one is outdated; delete the outdated one")
    names = list_weights(folder)
    if not names:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        note = f" (pickle files such as {pickles[0]} are not shared, as loading them runs code)" if pickles else ""
        raise UserError(f"{folder} holds no weights in safetensors format{note}; save the model with save_pretrained")
    for name in names:
        check_inside(folder, folder / name)
        refuse_pointer(folder / name, f"{name} of {folder}")
    if count_parameters(folder) is None:
        raise UserError(f"{folder} lacks some of the weight files that {INDEX} lists; copy them, or save it again")
    if names != [SINGLE]:
        return {name: folder / name for name in (INDEX, *names)}
    try:
        limit = max_shard_size if isinstance(max_shard_size, int) else parse_size_to_int(max_shard_size)
    except ValueError:
        limit = 0
    if limit < 1:
        raise UserError(f"max_shard_size '{max_shard_size}' is not a size; give one such as 5GB, 100MB or 1000")
    if weights.stat().st_size <= limit:
        return {SINGLE: weights}
    try:
        pattern = "model{suffix}.safetensors"
        save_torch_state_dict(load_file(weights), scratch, filename_pattern=pattern, max_shard_size=limit)
    except (SafetensorError, OSError) as error:
        problem = f"{SINGLE} cannot be split into shards in {scratch.parent} ({error})"
        room = f"make room for {weights.stat().st_size:,} bytes there"
        raise UserError(f"{problem}; {room}, set TMPDIR, or give a larger --max-shard-size") from error
    return {path.name: path for path in scratch.iterdir()}


def describe_model(
    folder: Path, repo_id: str, *, license: str | None = None, share_images: bool = False
) -> dict[str, bytes]:
    """Return the files that describe the model: the card, and the results in the Hub's format."""
    descriptions = {CARD_NAME: _make_card(folder, repo_id, license, share_images).encode()}
    results = make_results_file(select_comparable(load_facts(folder, read_config(folder))), repo_id)
    return descriptions if results is None else descriptions | {RESULTS_FILE: results}


def _make_card(folder: Path, repo_id: str, license: str | None, share_images: bool) -> str:
    """Return the card to share: rendered from the facts, or the existing one if it was written by hand."""
    path = folder / CARD_NAME
    check_inside(folder, path)
    if path.is_file() and not is_rendered(folder):
        stated_license = read_license(folder).get("license")
        if license is not None and stated_license not in (None, license):
            problem = f"{CARD_NAME} of {folder} states the license {stated_license}, but --license {license} was given"
            raise UserError(f"{problem}; correct {CARD_NAME}, or leave --license out")
        try:
            card = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{CARD_NAME} of {folder} is not UTF-8 text; save it as UTF-8") from error
        image_plots = sorted(filter(shows_images, _parse_plots(card)))
        if image_plots and not share_images:
            problem = f"the card shows {', '.join(image_plots)} with images of the data set"
            raise UserError(f"{problem}; add --share-images (share_images=True) to make them public, or remove them")
    else:
        missing_facts = list_missing_facts(folder)
        if missing_facts:
            problem = f"the card of {folder} cannot be written, because facts.json lacks {'; '.join(missing_facts)}"
            remedy = f"save the model with hf-vit finetune, pretrain or convert, or write {CARD_NAME} yourself"
            raise UserError(f"{problem}; {remedy}")
        card = render_card(folder, repo_id=repo_id, license=license, share_images=share_images)
        if not parse_license(card):
            raise UserError(NO_LICENSE)
    _check_metadata(card)
    return card


def list_missing_facts(folder: Path) -> list[str]:
    """Return descriptions of the required facts that facts.json lacks."""
    origins = Facts.load(folder).list_origins()
    if not origins:
        return [f"the origin of the weights (no record of a training or a conversion in {FACTS_NAME})"]
    latest = origins[-1]
    is_training = latest.kind == "training"
    is_known = {
        "the training data (data.name of the training record)": not is_training or (latest.data and latest.data.name),
        "the converted checkpoint (source of the conversion record)": is_training or latest.values.get("source"),
        f"the command of the {latest.kind}": latest.command,
    }
    return [fact for fact, known in is_known.items() if not known]


def list_plots(folder: Path, card: str) -> set[str]:
    """Return the local images that the card shows, as paths in the folder; raise a UserError if an image is missing."""
    plots = _parse_plots(card)
    for name in sorted(plots):
        if not (folder / check_file_name(name, "the card")).is_file():
            raise UserError(f"the card shows {name}, which {folder} lacks; copy it there, or remove it from the card")
    return plots


def _parse_plots(card: str) -> set[str]:
    """Return the relative paths of all images in a card's Markdown and HTML."""
    sources: list[str] = re.findall(r"!\[(?:\\.|[^\\\]])*\]\(\s*(<[^>\n]+|[^)\s]+)", card)
    sources += re.findall(r"<img\s[^>]*?\bsrc\s*=\s*([\"'][^\"']+|[^\s>]+)", card, flags=re.IGNORECASE)
    paths = (unquote(re.split("[?#]", source)[0]) for source in sources if "://" not in source)
    # A stranger's card may name any other file.
    return {path.lstrip("<\"'").removeprefix("./") for path in paths if _PICTURE.search(path)}
