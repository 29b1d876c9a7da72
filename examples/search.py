"""Search a data set by image: features in parquet files, a FAISS index, and its recall against exact search.

    pip install faiss-cpu
    python examples/search.py out/demo digits docs/images/digit.png

Prints the ten nearest images of each query, by cosine similarity.
"""

import sys
import time
from pathlib import Path

import faiss
import numpy as np
import torch
from PIL import Image
from pyarrow import parquet
from transformers import AutoImageProcessor, AutoModel

from hf_vit.data import to_rgb
from hf_vit.evaluation import embed

NEAREST, OUTPUT = 10, Path("out/search")


def main(model: str, data: str, *queries: str) -> None:
    embed(model, data, OUTPUT)  # run again, it continues or has nothing to do
    table = parquet.read_table(sorted(OUTPUT.glob("*.parquet")))
    vectors = table["embedding"].combine_chunks().flatten().to_numpy().astype(np.float32).reshape(len(table), -1)
    faiss.normalize_L2(vectors)
    size = vectors.shape[1]
    index, exact = faiss.IndexHNSWFlat(size, 32, faiss.METRIC_INNER_PRODUCT), faiss.IndexFlatIP(size)
    index.hnsw.efConstruction, index.hnsw.efSearch = 100, 64
    answers, sample = [], vectors[:: max(len(vectors) // 1000, 1)]
    for name, searched in (("HNSW", index), ("exact", exact)):
        start = time.perf_counter()
        searched.add(vectors)
        built = time.perf_counter()
        answers.append(searched.search(sample, NEAREST)[1])
        seconds = time.perf_counter() - built
        print(
            f"{name}: {len(vectors):,} images in {built - start:.1f} s, {1000 * seconds / len(sample):.3f} ms a query"
        )
    shared = [len({*found} & {*wanted}) for found, wanted in zip(*answers, strict=True)]
    print(f"recall of the {NEAREST} nearest: {np.mean(shared) / NEAREST:.2%} of {len(sample):,} queries")

    processor, network = AutoImageProcessor.from_pretrained(model), AutoModel.from_pretrained(model).eval()
    for query in queries:
        with torch.inference_mode():
            pixels = processor(to_rgb(Image.open(query)), return_tensors="pt")
            vector = network(**pixels).pooler_output.flatten(1).numpy()
        faiss.normalize_L2(vector)
        for score, row in zip(*(found[0] for found in index.search(vector, NEAREST)), strict=True):
            print(f"{query}: {score:.3f} {table['image'][row].as_py() or table['index'][row]} {table['label'][row]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
