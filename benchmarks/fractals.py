"""How many fractals a core makes in a second (`--data fractals`), as tables and streams get them.

    python benchmarks/fractals.py [--turns 7] [--output benchmarks/results/fractals.json]

The classes are drawn beforehand, which is timed by itself.
"""

import numpy as np

from hf_vit.data.builtin.fractals import Fractals
from hf_vit.speed.measuring import quartiles, take_turns
from hf_vit.speed.script import Script, parser

IMAGES = {32: 1024, 64: 256, 224: 16}  # side in px -> images a turn


def main() -> None:
    report = Script(parser(__doc__, turns=7).parse_args())
    fractals = Fractals(classes=64)

    def draw() -> None:
        Fractals(classes=64).systems  # noqa: B018 - kept once it was asked for

    draw()
    seconds = take_turns(
        {
            "classes": draw,
            **{
                str(side): lambda side=side, count=count: fractals.render("train", np.arange(count), side)
                for side, count in IMAGES.items()
            },
        },
        report.options.turns,
    )
    report.add(classes_per_second=round(64 / quartiles(seconds["classes"]).median, 1))
    for side, count in IMAGES.items():
        report.add(side_px=side, images_per_second=round(count / quartiles(seconds[str(side)]).median, 1))
    report.finish()


if __name__ == "__main__":
    main()
