"""Converting a B/16 `.npz` of random weights: seconds, memory, and reading beside plain `np.load`.

    python benchmarks/conversion.py [--turns 15] [--threads N] [--output benchmarks/results/conversion.json]

`np.load` reads every array and checks the checksums. Reading is what `hf-vit convert` and `from_hub` do: open, plan,
all checks, and turned copies. Memory is the peak of a process of its own above what the imports take; the promise is at
most 1.3 x the checkpoint + 300 MB.
"""

import tempfile
import time
import zipfile
from pathlib import Path

import numpy as np
import torch

import hf_vit.conversion as conversion
from hf_vit.conversion.fill import load_weights
from hf_vit.conversion.readers import NpzReader
from hf_vit.speed.measuring import Script, parser, quartiles, run_program, speed_ratio

# Prints seconds, and bytes of peak memory above the imports. VmHWM is the highest resident size so far.
PROGRAM = """
import json, re, sys, time
from pathlib import Path
import transformers, hf_vit.conversion
from hf_vit.models import modeling_hf_vit
from transformers import ViTImageProcessor

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before, started = peak(), time.perf_counter()
hf_vit.conversion.convert(sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - started, "bytes": peak() - before}))
"""


def make_b16(folder: Path) -> dict[str, Path]:
    """The arrays of ViT-B/16 with 1,000 labels under the keys of Google's files, stored and compressed."""
    rng = np.random.default_rng(0)
    width, heads, mlp, depth = 768, 12, 3072, 12
    shapes: dict[str, tuple[int, ...]] = {
        "embedding/kernel": (16, 16, 3, width),
        "embedding/bias": (width,),
        "cls": (1, 1, width),
        "Transformer/posembed_input/pos_embedding": (1, 197, width),
        "Transformer/encoder_norm/scale": (width,),
        "Transformer/encoder_norm/bias": (width,),
        "head/kernel": (width, 1000),
        "head/bias": (1000,),
    }
    for at in (f"Transformer/encoderblock_{block}" for block in range(depth)):
        attention, dense = f"{at}/MultiHeadDotProductAttention_1", f"{at}/MlpBlock_3"
        shapes |= {f"{at}/LayerNorm_{number}/{name}": (width,) for number in (0, 2) for name in ("scale", "bias")}
        shapes |= {f"{attention}/{name}/kernel": (width, heads, 64) for name in ("query", "key", "value")}
        shapes |= {f"{attention}/{name}/bias": (heads, 64) for name in ("query", "key", "value")}
        shapes |= {f"{attention}/out/kernel": (heads, 64, width), f"{attention}/out/bias": (width,)}
        shapes |= {f"{dense}/Dense_0/kernel": (width, mlp), f"{dense}/Dense_0/bias": (mlp,)}
        shapes |= {f"{dense}/Dense_1/kernel": (mlp, width), f"{dense}/Dense_1/bias": (width,)}
    arrays = {key: rng.standard_normal(shape, dtype=np.float32) for key, shape in shapes.items()}
    np.savez(folder / "stored.npz", **arrays)
    with zipfile.ZipFile(folder / "compressed.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for key, value in arrays.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, value)
    return {name: folder / f"{name}.npz" for name in ("stored", "compressed")}


def by_numpy(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def by_us(path: Path) -> dict[str, torch.Tensor]:
    with NpzReader(path) as reader:
        return load_weights(reader, conversion.plan(reader.shapes)).state


def turns_of(path: Path, turns: int) -> dict[str, list[float]]:
    """Seconds of every way in every turn."""
    ways = {"reading": lambda: by_us(path), "numpy": lambda: by_numpy(path)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-2, turns):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            if turn >= 0:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    report = Script(parser(__doc__, turns=15).parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        for form, path in make_b16(Path(temporary)).items():
            seconds = turns_of(path, report.options.turns)
            found = run_program(PROGRAM, path, Path(temporary) / f"out-{form}")
            size = (Path(temporary) / "stored.npz").stat().st_size
            report.record(
                form=form,
                megabytes=round(path.stat().st_size / 1e6),
                reading_time_of_numpys=speed_ratio(seconds, "numpy", "reading"),
                reading_seconds=round(quartiles(seconds["reading"]).median, 2),
                conversion_seconds=round(found["seconds"], 2),
                peak_megabytes=round(found["bytes"] / 1e6),
                allowed_megabytes=round((1.3 * size + 300e6) / 1e6),
            )
    report.finish()


if __name__ == "__main__":
    main()
