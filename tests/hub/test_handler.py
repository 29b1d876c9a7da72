"""`handler.py`, which a push adds: a fresh process answers over HTTP what transformers and hf_vit say here."""

import base64
import hashlib
import io
import itertools
import json
import os
import re
import runpy
import shutil
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_heads import build
from evaluation.tiny import make_classifier, make_images, make_processor
from hub.conftest import save_model
from loopback.client import Client, Job, Loopback
from PIL import Image
from transformers import (
    AutoModel,
    EomtConfig,
    EomtForUniversalSegmentation,
    EomtImageProcessor,
    Mask2FormerImageProcessor,
    Siglip2Config,
    Siglip2ForImageClassification,
    Siglip2ImageProcessor,
    ViTModel,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessor,
    pipeline,
)

import hf_vit
from hf_vit.hub.card import render_card
from hf_vit.loading import load_model
from hf_vit.loading.outputs import compute_pre_logits

CLASSIFIERS: dict[str, dict[str, Any]] = {
    "classes": {},
    "several": {"problem_type": "multi_label_classification"},
    "values": {"problem_type": "regression", "id2label": {0: "height", 1: "width"}},
}
DENSE = {"linear": "plain", "mask2former": "hybrid", "mask-rcnn": "plain", "detr": "axial"}
OPENED = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def save_dense(folder: Path, head: str) -> Path:
    for part in build(DENSE[head], head):
        part.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def save_features(folder: Path) -> Path:
    save_model(folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(1)
    hf_vit.HfViTModel(hf_vit.HfViTConfig.from_pretrained(folder)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of every task."""
    root = tmp_path_factory.mktemp("tasks")
    saved = {name: save_model(root / name, **fields) for name, fields in CLASSIFIERS.items()}
    saved |= {head: save_dense(root / head, head) for head in DENSE}
    return saved | {"features": save_features(root / "features")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of several sizes and modes: RGB, transparent, 16 bits, gray, rotated by EXIF."""
    root, colours = tmp_path_factory.mktemp("images"), make_images(4, side=48)
    clear = colours[1].convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize((48, 48)))
    deep = np.asarray(colours[2].convert("L")).astype(np.uint16) * 200
    exif = Image.Exif()
    exif[0x0112] = 6
    wide = colours[3].resize((64, 40))
    for number, (image, options) in enumerate(
        [(colours[0], {}), (clear, {}), (Image.fromarray(deep), {}), (wide.convert("L"), {}), (wide, {"exif": exif})]
    ):
        image.save(root / f"{number}.png", **options)
    return sorted(root.iterdir())


class Server:
    """Asks a running server."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, name: str, content: Any, kind: str = "application/json") -> tuple[int, Any]:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.address}/{name}", body, {"Content-Type": kind})
        try:
            with OPENED.open(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def answer(self, name: str, inputs: Any, **parameters: Any) -> Any:
        status, answer = self.ask(name, {"inputs": inputs, "parameters": parameters})
        assert status == 200, answer
        return answer

    def state(self) -> Any:
        return json.load(OPENED.open(self.address, timeout=60))


@pytest.fixture(scope="module")
def servers(loopback_server: Loopback, _client_of: Callable[..., Client], folders: Any, tmp_path_factory: Any) -> Any:
    """Pushes the models, and serves what arrives in two processes that have transformers; the second has hf_vit."""
    loopback_server.reset()
    pushes = [{"folder": str(path), "repo_id": f"alice/{name}", "license": "mit"} for name, path in folders.items()]
    for done in _client_of("xet").run("hub.jobs:push_many", pushes=pushes):
        assert {"handler.py", "requirements.txt"} <= set(done["files"]), done
    root, jobs, servers = tmp_path_factory.mktemp("ports"), list[Job](), dict[str, Server]()
    for name in ("without", "with"):
        port, repo_ids = root / name, [push["repo_id"] for push in pushes]
        jobs.append(_client_of("xet", name).start("hub.serving:serve", repo_ids=repo_ids, port_file=str(port)))
        end = time.monotonic() + 120
        while not (port.exists() and port.read_text()):
            assert time.monotonic() < end
            if jobs[-1].client.warm.ask("wait", pid=jobs[-1].pid, seconds=0.1) is not None:
                pytest.fail(jobs[-1]._read("stderr"))
        servers[name] = Server(f"http://127.0.0.1:{port.read_text()}")
    yield servers
    for job in jobs:
        job.kill()
        job.client.warm.ask("wait", pid=job.pid, seconds=10)


@pytest.fixture(params=["without", "with"])
def server(request: Any, servers: dict[str, Server]) -> Server:
    return servers[request.param]


def load_handler(folder: Path) -> Any:
    return runpy.run_path(str(Path(hf_vit.__file__).parent / "hub/handler.py"))["EndpointHandler"](str(folder))


def same_classes(answer: Any, expected: Any) -> None:
    assert [entry["label"] for entry in answer] == [entry["label"] for entry in expected]
    np.testing.assert_allclose([e["score"] for e in answer], [e["score"] for e in expected], rtol=0, atol=1e-5)


def test_every_task_is_answered(server: Server, folders: dict[str, Path], files: list[Path], request: Any) -> None:
    assert server.state()["hf_vit"] == ("[with]" in request.node.name)
    texts = [base64.b64encode(path.read_bytes()).decode() for path in files]
    for name in CLASSIFIERS:
        decoded = [hf_vit.data.to_rgb(Image.open(path)) for path in files]
        expected = pipeline("image-classification", model=str(folders[name]))(decoded)
        answers = server.answer(name, texts)
        if name == "values":  # in the order of the model
            answers, expected = (
                [sorted(row, key=lambda e: e["label"]) for row in rows] for rows in (answers, expected)
            )
        for answer, wanted in zip(answers, expected, strict=True):
            same_classes(answer, wanted)
    (best, second, *_), path = pipeline("image-classification", model=str(folders["classes"]))(decoded[0]), files[0]
    for status, answer in (
        server.ask("classes?top_k=2", path.read_bytes(), "application/octet-stream"),
        server.ask("classes?top_k=2", path.read_bytes(), "image/png"),
        server.ask("classes", {"inputs": f"data:image/png;base64,{texts[0]}", "parameters": {"top_k": 2}}),
    ):
        assert status == 200
        same_classes(answer, [best, second])
    raw = server.answer("classes", texts[0], function_to_apply="none", top_k=None)
    assert len(raw) == 6
    probabilities = torch.tensor([entry["score"] for entry in raw]).softmax(0)
    assert probabilities[0].item() == pytest.approx(best["score"], abs=1e-5)
    with torch.no_grad():
        pixels = make_processor()(decoded, return_tensors="pt")["pixel_values"]
        pooled = AutoModel.from_pretrained(folders["features"]).eval()(pixels).pooler_output
    np.testing.assert_allclose(server.answer("features", texts), pooled, rtol=0, atol=1e-5)
    for head in DENSE:
        wanted = hf_vit.predict(str(folders[head]), files, threshold=0.2)
        detects = not head.startswith(("linear", "mask2"))
        answers = server.answer(head, texts, **({"threshold": 0.2} if detects else {}))
        assert any(answers)
        for answer, prediction in zip(answers, wanted, strict=True):
            masks = [np.asarray(_read_mask(entry)) for entry in answer if "mask" in entry]
            if not detects:
                assert sorted(e["label"] for e in answer) == sorted(e["label"] for e in prediction.answers)
                names = [["sky", "cat"][value] for value in np.unique(prediction.mask)]
                assert [entry["label"] for entry in answer] == names
                for mask, value in zip(masks, np.unique(prediction.mask), strict=True):
                    assert (mask == 255 * (prediction.mask == value)).mean() > 0.999
                continue
            same_classes(answer, prediction.answers)
            boxes = [list(entry["box"].values()) for entry in answer]
            np.testing.assert_allclose(boxes, [e["box"] for e in prediction.answers] or boxes, rtol=0, atol=1.01)
            assert len(masks) == (len(answer) if head == "mask-rcnn" else 0)


def _read_mask(entry: Any) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(entry["mask"])))


BAD: list[tuple[Any, str]] = [
    ({"inputs": "bm90IGFuIGltYWdl"}, "image 0 is not a readable image: its format is unknown"),
    ({"inputs": "%%%"}, "image 0 is neither valid base64 nor an https URL"),
    ({"inputs": "/etc/passwd"}, "is neither valid base64"),
    ({"inputs": "file:///etc/passwd"}, "is neither valid base64"),
    ({"inputs": "http://127.0.0.1:1/x.png"}, "only https on port 443"),
    ({"inputs": "https://127.0.0.1/x.png"}, "the host's address is not public"),
    ({"inputs": "https://169.254.169.254/x.png"}, "the host's address is not public"),
    ({"inputs": "https://user@example.org/x.png"}, "without a user name"),
    ({"inputs": ["", {}]}, "image 0 is not"),
    ({"inputs": 3}, "image 0 is of type int"),
    ({"inputs": []}, "the request has 0 images"),
    ({"inputs": ["x"] * 257}, "the request has 257 images"),
    *((value, 'the request has no "inputs"') for value in ({}, ["x"], None)),
    ({"inputs": "", "parameters": {"top_k": 0}}, "top_k is 0 and threshold 0.5; give a top_k of at least 1 and"),
    *(({"inputs": "", "parameters": {"top_k": value}}, f"top_k is {value!r} and threshold 0.5; give a top_k")
      for value in ("two", True, 2.5, [2], float("nan"))),
    ({"inputs": "", "parameters": {"top_k": "x" * 10**6}}, "top_k is 'xxx"),
    ({"inputs": "", "parameters": 3}, '"parameters" is of type int; give an object'),
    ({"inputs": "", "parameters": {"function_to_apply": []}}, "function_to_apply is []"),
    ({"inputs": "", "parameters": {"threshold": 0.5}}, "unknown parameter 'threshold' for image-classification"),
    ({"inputs": "", "parameters": {"function_to_apply": "tanh"}}, "function_to_apply is 'tanh'"),
]  # fmt: skip


@pytest.mark.parametrize("server", ["with"], indirect=True)  # optimized, as the more delicate
def test_bad_requests_are_told_and_good_ones_go_on(server: Server, files: list[Path]) -> None:
    """From eight threads: each request gets its own answer."""
    good = [base64.b64encode(path.read_bytes()).decode() for path in files]
    alone = [server.answer("classes", text) for text in good]
    cut = base64.b64encode(files[0].read_bytes()[:200]).decode()
    bad = [*BAD, ({"inputs": [good[0], cut]}, "image 1 is not a readable image")]

    def ask(number: int) -> None:
        content, words = bad[number % len(bad)]
        status, answer = server.ask("classes", content)
        assert (status, answer["kind"]) == (400, "ValueError"), (content, answer)
        assert words in answer["error"]
        assert "\n" not in answer["error"]
        assert len(answer["error"]) < 400
        same_classes(server.answer("classes", good[number % 5]), alone[number % 5])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(4 * len(bad))))


LOAD_SECONDS = int(os.environ.get("LOAD_SECONDS", "30"))


@pytest.mark.slow  # half a minute of load, on a model of every task, each way
@pytest.mark.timeout(LOAD_SECONDS + 300)
def test_memory_does_not_grow_under_load(server: Server, folders: dict[str, Path], files: list[Path]) -> None:
    """Four threads, one request in five bad; the last third of the time needs no more than the one before."""
    texts = [base64.b64encode(path.read_bytes()).decode() for path in files]
    start, names = time.monotonic(), list(folders)

    def work(thread: int) -> list[tuple[float, int]]:
        curve = list[tuple[float, int]]()
        while (passed := time.monotonic() - start) < LOAD_SECONDS:
            number = len(curve)
            inputs = texts if number % 5 else [*texts, "bad"]
            status, answer = server.ask(names[number % len(names)], {"inputs": inputs})
            assert status == (200 if number % 5 else 400), answer
            curve.append((passed, server.state()["bytes"]))
        return curve

    with ThreadPoolExecutor(4) as threads:
        curve = sorted(itertools.chain.from_iterable(threads.map(work, range(4))))
    print(len(curve), "requests; s, MiB:", [(int(s), memory >> 20) for s, memory in curve[:: len(curve) // 20 + 1]])
    middle, last = ([memory for s, memory in curve if int(3 * s / LOAD_SECONDS) == third] for third in (1, 2))
    assert np.mean(last) < np.mean(middle) + 4 * 2**20


def test_urls_lead_to_public_hosts_alone(folders: dict[str, Path], files: list[Path], tmp_path: Path, monkeypatch):
    """A TLS server here stands for the public host 93.184.216.34; no other address is ever connected to."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    names = ["-subj", "/CN=images.example", "-addext", "subjectAltName=DNS:images.example"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    answers = {
        "/a.png": (200, {}, files[0].read_bytes()),
        "/moved": (302, {"Location": "/a.png"}, b""),
        "/inside": (302, {"Location": "https://inside.example/a.png"}, b""),
        "/plain": (302, {"Location": "http://images.example/a.png"}, b""),
        "/loop": (302, {"Location": "/loop"}, b""),
        "/large": (200, {}, bytes(33 * 10**6)),
        "/slow": (200, {}, files[0].read_bytes()),
    }

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answers.get(self.path, (404, {}, b""))
            time.sleep(0.3 if self.path == "/slow" else 0)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server, context = HTTPServer(("127.0.0.1", 0), Requests), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    addresses = {"images.example": "93.184.216.34", "inside.example": "10.0.0.7"}
    connected, connect = list[str](), socket.create_connection

    def find(host: str, port: int, *_: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.get(host, host), port))]

    def connect_here(address: tuple[str, int], timeout: float) -> socket.socket:
        connected.append(address[0])
        return connect(("127.0.0.1", server.server_port), timeout)

    monkeypatch.setattr(socket, "getaddrinfo", find)
    monkeypatch.setattr(socket, "create_connection", connect_here)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    handler = load_handler(folders["classes"])
    expected = handler({"inputs": files[0].read_bytes()})
    assert handler({"inputs": "https://images.example/a.png"}) == expected
    assert handler({"inputs": ["https://images.example/moved"]}) == [expected]
    assert {*connected} == {"93.184.216.34"}
    for path, words in {
        "images.example/inside": "not public", "images.example/plain": "only https",
        "images.example/large": "32,000,000", "images.example/none": "status 404",
        "images.example/loop": "more than 3 redirects", "images.example:8080/a": "port 443",
        "inside.example/a.png": "not public", "192.168.1.1/a.png": "not public",
        "images.example/\r\nX: y": "cannot be read", "0x7f.1/a": "cannot be read",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=words):
            handler({"inputs": f"https://{path}"})
    assert {*connected} == {"93.184.216.34"}
    monkeypatch.setitem(handler.__class__.__call__.__globals__, "REQUEST_SECONDS", 1)
    connected.clear()
    with pytest.raises(ValueError, match=r"cannot be read: .*send its bytes or base64 instead"):
        handler({"inputs": ["https://images.example/slow"] * 30})
    assert 3 <= len(connected) <= 4, "one limit for all images of a request"
    server.shutdown()
    server.server_close()


def test_images_in_their_own_shape(files: list[Path], tmp_path: Path) -> None:
    """Where the processor keeps it: as hf_vit.predict does; and of a model that reads grids, as transformers does."""
    ours = save_model(tmp_path / "ours")
    settings = json.loads((ours / "preprocessor_config.json").read_text())
    (ours / "preprocessor_config.json").write_text(json.dumps(settings | {"max_num_patches": 24}))
    handler = load_handler(ours)
    expected = hf_vit.predict(str(ours), files)
    for inputs in ([path.read_bytes() for path in files], [path.read_bytes() for path in files[:2]]):
        answers = handler({"inputs": inputs, "parameters": {"top_k": 10**30}})
        for answer, prediction in zip(answers, expected, strict=False):
            same_classes(answer[:5], [{"label": label, "score": score} for label, score in prediction.scores])
            assert len(answer) == 6
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = Siglip2Config(vision_config={**sizes, "patch_size": 4, "num_patches": 9}, num_labels=6)
    Siglip2ForImageClassification(config).save_pretrained(tmp_path / "theirs")
    Siglip2ImageProcessor(patch_size=4, max_num_patches=24).save_pretrained(tmp_path / "theirs")
    images = [hf_vit.data.to_rgb(Image.open(path)) for path in files]
    expected = pipeline("image-classification", model=str(tmp_path / "theirs"))(images)
    for answer, wanted in zip(load_handler(tmp_path / "theirs")({"inputs": images}), expected, strict=True):
        same_classes(answer, wanted)


def test_a_model_of_gray_images(files: list[Path], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Handler and card turn images gray for it; the card names no command, as these take images in color only."""
    folder = save_model(tmp_path / "gray", num_channels=1)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings |= {"image_mean": [0.5], "image_std": [0.5], "do_convert_rgb": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    answers = load_handler(folder)({"inputs": [path.read_bytes() for path in files]})
    card = render_card(folder)
    assert not re.search("hf-vit (predict|page)", card)
    monkeypatch.chdir(tmp_path)
    for path, answer in zip(files, answers, strict=True):
        shutil.copyfile(path, "image.png")
        exec(re.findall("```python\n(.+?)```", card, re.DOTALL)[0], {})
        assert capsys.readouterr().out.strip() == answer[0]["label"]


@pytest.mark.parametrize("kind", ["yolos", "eomt", "padded eomt", "mask2former", "mask-rcnn"])
def test_padded_images_and_parts_and_damaged_weights(kind: str, tmp_path: Path) -> None:
    """As hf_vit.predict does: masks and boxes are those of the image, not of the square in which it lies."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"image_size": [64, 64] if kind == "yolos" else 64, "patch_size": 16}
    torch.manual_seed(3)
    fitted: dict[str, Any] = {"size": {"max_height": 64, "max_width": 64}, "pad_size": {"height": 64, "width": 64}}
    if kind in DENSE:
        model, processor = build("plain", kind)
        parts: tuple[Any, ...] = model, Mask2FormerImageProcessor(**fitted) if kind == "mask2former" else processor
    elif kind == "yolos":
        parts = YolosForObjectDetection(YolosConfig(**sizes)), YolosImageProcessor(**fitted)
    else:
        config = EomtConfig(**sizes, num_queries=4, num_blocks=1, num_upscale_blocks=1, num_labels=3)
        is_padded = kind.startswith("padded")
        steps = {"do_pad": is_padded, "do_split_image": not is_padded}
        processor = EomtImageProcessor(size={"shortest_edge": 64, "longest_edge": 64 if is_padded else None}, **steps)
        parts = EomtForUniversalSegmentation(config), processor
    has_boxes = kind in ("yolos", "mask-rcnn")
    with torch.no_grad():
        for weight in parts[0].parameters():
            weight.mul_(1 if has_boxes or weight.ndim < 2 else 3)  # so that masks have several classes
    for part in parts:
        part.save_pretrained(tmp_path)
    image = make_images(1)[0].resize((96, 40))
    (expected,) = hf_vit.predict(str(tmp_path), image, threshold=0.0)
    parameters = {"threshold": 0.0} if has_boxes else {}
    answer = load_handler(tmp_path)({"inputs": image, "parameters": parameters})
    assert sorted({entry["label"] for entry in answer}) == sorted({entry["label"] for entry in expected.answers})
    if has_boxes:
        boxes = [list(entry["box"].values()) for entry in answer]
        np.testing.assert_allclose(boxes, [entry["box"] for entry in expected.answers], rtol=0, atol=1.01)
    else:
        shares = {each["label"]: np.asarray(_read_mask(each)).mean() / 255 for each in answer}
        assert shares == pytest.approx({each["label"]: each["share"] for each in expected.answers}, abs=0.002)
    torch.nn.init.constant_(next(parts[0].parameters()), torch.nan)
    parts[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"{'weights' if kind == 'mask-rcnn' else 'outputs'} are not finite"):
        load_handler(tmp_path)({"inputs": image, "parameters": parameters})


@pytest.mark.parametrize("kind", [ViTModel, hf_vit.HfViTModel])
def test_a_pooler_without_weights_is_not_read(kind: Any, files: list[Path], tmp_path: Path) -> None:
    """As of transformers' DINO; it would be random, and the features others in every process."""
    config: Any = make_classifier().config
    if kind is hf_vit.HfViTModel:  # as pre-training leaves it
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        sizes |= {"image_size": 8, "patch_size": 4, "num_register_tokens": 3}
        config = hf_vit.HfViTConfig(pooling="map", norm_after_pooling=True, **sizes)
    vit = kind(config, add_pooling_layer=False).eval()
    for part in (vit, make_processor()):
        part.save_pretrained(tmp_path)
    images = [hf_vit.data.to_rgb(Image.open(path)) for path in files]
    with torch.no_grad():
        pixels = make_processor()(images, return_tensors="pt")["pixel_values"]
        states = vit(pixels).last_hidden_state
    expected = (states[:, 0] if kind is ViTModel else states[:, 3:].mean(1)).numpy()
    np.testing.assert_allclose(load_handler(tmp_path)({"inputs": images}), expected, rtol=0, atol=1e-5)
    loaded = load_model(tmp_path, "cpu")
    with torch.no_grad():
        features = compute_pre_logits(loaded.model, loaded.pixel_values(images))
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5)


def test_large_images_are_decoded_one_by_one(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of 256 images holds one of them at a time."""
    handler, alive, most = load_handler(folders["classes"]), set[int](), 0
    read = handler.__class__._answer.__globals__["_read"]

    def watch(*arguments: Any) -> Image.Image:
        nonlocal most
        image = read(*arguments)
        alive.add(id(image))
        weakref.finalize(image, alive.discard, id(image))
        most = max(most, len(alive))
        return image

    monkeypatch.setitem(handler.__class__._answer.__globals__, "_read", watch)
    assert len(handler({"inputs": make_images(40, side=48)})) == 40
    assert most <= 2  # the next one is read before the last is dropped
    deep = io.BytesIO()  # of few bytes
    Image.fromarray(np.zeros((1000, 1000), np.uint16)).save(deep, "PNG")
    tracemalloc.start()
    handler({"inputs": deep.getvalue()})
    assert tracemalloc.get_traced_memory()[1] < 15 * 1000 * 1000
    tracemalloc.stop()


def test_a_handler_of_its_own_is_shared_in_place_of_ours(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    (model_folder / "requirements.txt").write_text("private\n")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    needed = xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name="requirements.txt")
    assert {"pillow", "numpy>=2.0"} < {*needed.split()}, "not the private file, which no handler came with"
    code = xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name="handler.py")
    above, mark = code.replace("top_k", "best").rsplit(" SHA-256 of all above: ", 1)
    for digest in (hashlib.sha256(above.encode()).hexdigest() + "\n", mark):  # of another version; changed by the user
        (model_folder / "handler.py").write_text(f"{above} SHA-256 of all above: {digest}")
        xet_client.run("hub.jobs:push", folder=str(model_folder))
        pushed = xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name="handler.py")
        assert pushed == (code if digest != mark else (model_folder / "handler.py").read_text())
    (model_folder / "handler.py").write_text("class EndpointHandler: ...\n")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    for name in ("handler.py", "requirements.txt"):
        assert xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name=name) == (model_folder / name).read_text()
    texts = {name: (model_folder / name).read_text() for name in ("handler.py", "requirements.txt")}
    for name in texts:
        (model_folder / name).unlink()
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    for name, text in texts.items():
        assert xet_client.run("hub.jobs:read", repo_id="alice/my-vit", name=name) == text, "it may be on the Hub alone"
    (model_folder / "handler.py").write_text("TOKEN = 'hf_" + "aB3dE6gH9" * 4 + "'\n")
    assert "handler.py holds" in xet_client.run("hub.jobs:push", folder=str(model_folder))["error"]
