"""The picture of a page in README.md and docs/page.md: `make page` takes it, `test_page.py` says when it is stale."""

import hashlib
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))
from pages.browser import RUNTIME, browser, served  # noqa: E402
from PIL import Image  # noqa: E402
from PIL.PngImagePlugin import PngInfo  # noqa: E402

from hf_vit.pages.making import make_page  # noqa: E402

PICTURE, MODEL = ROOT / "docs/images/page.png", ROOT / "model_cards/vit-digits"


def sources() -> str:
    """A digest of what the picture shows: the page's own files, the model, its figures."""
    static = sorted((ROOT / "src/hf_vit/pages/static").iterdir())
    files = [*static, *(MODEL / name for name in ("config.json", "facts.json", "model.safetensors"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def take_picture(file: Path) -> None:
    """A 3, and what its upper patches attend to, in a window of 1100 px."""
    with TemporaryDirectory() as folder:
        make_page([MODEL], Path(folder) / "page", images="digits", runtime=RUNTIME)
        with served(Path(folder) / "page") as address, browser(Path(folder) / "profile") as window:
            window("open", url=address)
            window.results()
            window("click", selector="#examples button[title='3']")
            window.results()
            for _ in range(2):
                window("press", selector=".stage", key="ArrowRight")
            window("look", file=str(Path(folder) / "page.png"), width=1100, height=900, scheme="light")
        about = PngInfo()
        about.add_text("sources", sources())
        with Image.open(Path(folder) / "page.png") as taken:
            taken.convert("RGB").save(file, pnginfo=about, optimize=True)


if __name__ == "__main__":
    take_picture(PICTURE)
