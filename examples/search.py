"""Search images by image with FAISS (pip install faiss-cpu): python examples/search.py out/demo digits query.png"""

import glob
import sys
import time

import faiss
import numpy as np
import torch
from pyarrow import parquet

from hf_vit.data.images import decode_image
from hf_vit.evaluation import embed
from hf_vit.evaluation.reading import compute_features
from hf_vit.loading import load_model
from hf_vit.loading.pixels import find_max_patches, keep_image_sizes

model, data, *queries = sys.argv[1:]
embed(model, data, "out/search")  # run again, it continues or has nothing to do
table = parquet.read_table(glob.glob("out/search/*.parquet"))
faiss.normalize_L2(vectors := np.stack(table["embedding"].to_numpy()))
sample, answers = vectors[:: max(len(vectors) // 1000, 1)], []
for name in ("Flat", "HNSW64"):  # exact search, and a graph of neighbors
    index, start = faiss.index_factory(vectors.shape[1], name, faiss.METRIC_INNER_PRODUCT), time.perf_counter()
    index.add(vectors)
    added = time.perf_counter()
    answers.append(index.search(sample, 10)[1])
    milliseconds = 1000 * (time.perf_counter() - added) / len(sample)
    print(f"{name}: {len(vectors):,} images in {added - start:.1f} s, {milliseconds:.3f} ms a query")
shared = [len({*exact} & {*found}) / 10 for exact, found in zip(*answers, strict=True)]
print(f"recall of the 10 nearest: {np.mean(shared):.2%} of {len(sample):,} queries")

subject = load_model(model)
if max_num_patches := find_max_patches(subject):  # images in their own shape
    subject = keep_image_sizes(subject, max_num_patches)
for query in queries:
    with torch.inference_mode():
        faiss.normalize_L2(vector := compute_features(subject.model, subject.pixel_values([decode_image(query)])))
    for score, row in zip(*(found[0] for found in index.search(vector, 10)), strict=True):
        print(f"{query}: {score:.3f} {table['image'][row].as_py() or table['index'][row]} {table['label'][row]}")
