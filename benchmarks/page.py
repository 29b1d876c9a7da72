"""Measure how long a visitor waits for the first answer of a page, in headless Chromium with an empty cache.

From the opening of the address, on a server of this machine, until the classes and all maps of the first example are
there. By WebAssembly, in one thread, as on any host that does not isolate its pages. `make browser` installs what it
needs.
"""

import os
import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from script import Script, parser, save_with_processor

from hf_vit import HfViTForImageClassification, variant_config
from hf_vit.pages.making import make_page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from pages.browser import RUNTIME, browser, served  # noqa: E402


def measure_first_answers(page: Path, openings: int, scratch: Path) -> tuple[list[float], str]:
    """Return the seconds of each opening in a new browser, and the time per image that the page reports."""
    seconds, status = [], ""
    with served(page) as address:
        for number in range(openings):
            with browser(scratch / f"profile {page.name} {number}") as window:
                window("open", url=address)
                seconds += [result["seconds"] for result in window.results()]
                status = window.text(".status")
    return seconds, status


def main() -> None:
    script = Script(parser(__doc__, turns=5).parse_args())
    with TemporaryDirectory() as folder:
        scratch = Path(folder)
        torch.manual_seed(0)
        random = HfViTForImageClassification(variant_config("S/16", num_labels=1000))  # weights do not affect the time
        models = {"vit-digits": ROOT / "model_cards/vit-digits", "S/16": save_with_processor(random, scratch / "S16")}
        for name, model in models.items():
            page = scratch / f"page of {model.name}"
            result = make_page([model], page, images="digits", runtime=RUNTIME)
            load = os.getloadavg()[0]
            seconds, status = measure_first_answers(page, script.options.turns, scratch)
            times = {"median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}
            script.record(model=name, **times, said=status, page_mb=result.megabytes, load=load)
    script.finish()


if __name__ == "__main__":
    main()
