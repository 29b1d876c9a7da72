"""Serve the model of a folder: `handler.py` of Inference Endpoints, and of any server that calls `EndpointHandler`.

`hf-vit push` puts a copy of this file beside the weights. It needs transformers and the code in that folder only, and
optimizes the model where hf_vit can be imported.
"""

import base64
import binascii
import contextlib
import http.client
import importlib
import inspect
import io
import ipaddress
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import numpy as np
import torch
import transformers
from PIL import Image, ImageOps

# Auto class -> task and its parameters. A model of any other class returns features.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "AutoModelForImageClassification": ("image-classification", ("top_k", "function_to_apply")),
    "AutoModelForSemanticSegmentation": ("image-segmentation", ()),
    "AutoModelForUniversalSegmentation": ("image-segmentation", ()),
    "AutoModelForObjectDetection": ("object-detection", ("threshold",)),
}
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")  # no format that starts another program
MAX_IMAGES, MAX_PIXELS, MAX_BYTES = 256, 64 * 10**6, 32 * 10**6
BATCH = 16
REDIRECTS = 3
SECONDS, REQUEST_SECONDS = 10, 60  # that the download of one image, and all downloads of a request, may take
INPUTS = "give an image as bytes, base64 text or an https URL, or a list of these"


class EndpointHandler:
    """Answer requests {"inputs": an image or a list of images, "parameters": {...}}.

    An image is bytes, a Pillow image, base64 text (also a data: URL) or an https URL of a public host. A list is
    answered by a list. Answers are those of transformers' pipelines:

    - classification: [{"label", "score"}], the highest score first; of a regression model all values, in order;
    - segmentation: [{"label", "score": None, "mask": PNG as base64}] for every class in the image;
    - detection: [{"label", "score", "box": {"xmin", "ymin", "xmax", "ymax"}}] in px, and a "mask" if there is one;
    - any other model: its features, [D].

    Parameters: `top_k` (default 5; None for all) and `function_to_apply` ("softmax", "sigmoid", "none") of a
    classifier, `threshold` (default 0.5) of a detector. Several threads may call one handler. Classifiers and features
    read images in their own shape where the image processor keeps it (`max_num_patches`), as hf_vit does.

    Raises:
        ValueError: a request that cannot be answered.
    """

    def __init__(self, path: str = "") -> None:
        """Load the model and its image processor from a folder, by default this file's; use the GPU if there is one."""
        folder = path or os.path.dirname(os.path.abspath(__file__))
        # This file is code of the repository too, so its other code is trusted; code of other repositories is not read.
        options = {"trust_remote_code": True, "local_files_only": True}
        hf_vit: Any = None
        with contextlib.suppress(ImportError):  # before loading, as its classes take precedence over the folder's code
            hf_vit = importlib.import_module("hf_vit")
        config: Any = transformers.AutoConfig.from_pretrained(folder, **options)
        auto_class = _find_auto_class(config)
        self.task, self.parameters = TASKS.get(auto_class, ("image-feature-extraction", ()))
        self.processor: Any = transformers.AutoImageProcessor.from_pretrained(folder, **options)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = getattr(transformers, auto_class)
        model, loading = model.from_pretrained(folder, output_loading_info=True, **options)
        if any("pooler" in key for key in loading["missing_keys"]):
            model.pooler = None  # its weights would be random
        is_mask_rcnn = self.task == "object-detection" and not hasattr(self.processor, "post_process_object_detection")
        if is_mask_rcnn and not all(weight.isfinite().all() for weight in model.parameters()):
            # torchvision drops objects that are NaN, so that no output would show it.
            raise ValueError("the model's weights are not finite (NaN or infinity); push them as they were before")
        model = model.to(self.device).eval()
        self.input_names = {"pixel_values", "pixel_mask", *inspect.signature(model.forward).parameters}
        if hf_vit is not None:
            with contextlib.suppress(hf_vit.UserError):  # a model that it does not know stays as it is
                model = hf_vit.optimize_for_inference(model)
        self.model = model
        self.lock = threading.Lock()  # a pass uses all cores, so passes take turns
        # transformers also trains a head with one output as a regression.
        has_one_output = config.problem_type is None and getattr(config, "num_labels", 0) == 1
        self.is_regression = config.problem_type == "regression" or has_one_output

    def __call__(self, data: Any) -> list[Any]:
        """Answer a request {"inputs": image or list of images, "parameters": options}; one image gets one answer.

        Raises:
            ValueError: the request has no images or too many, an unreadable one, or a parameter that is not valid.
        """
        data = data if isinstance(data, dict) else {}  # JSON may hold anything
        inputs = data.get("inputs")
        options = self._check_parameters(data.get("parameters") or {})
        if inputs is None:
            raise ValueError(f'the request has no "inputs"; {INPUTS}')
        is_list = isinstance(inputs, list | tuple)
        sources: list[Any] = list(inputs) if is_list else [inputs]
        if not 1 <= len(sources) <= MAX_IMAGES:
            raise ValueError(f"the request has {len(sources)} images; give 1 to {MAX_IMAGES}")
        answers = list[Any]()
        downloads = _Downloads()
        for start in range(0, len(sources), BATCH):
            answers += self._answer(sources[start:][:BATCH], start, downloads, options)
        return answers if is_list else answers[0]

    def _check_parameters(self, parameters: Any) -> dict[str, Any]:
        """Return the parameters, numbers in place of text (as query strings have it), and defaults for the others."""
        if not isinstance(parameters, dict):
            raise ValueError(f'"parameters" is of type {type(parameters).__name__}; give an object of names and values')
        unknown = sorted(set(parameters) - set(self.parameters))
        if unknown:
            known = ", ".join(self.parameters) or "none"
            raise ValueError(f"unknown parameter {unknown[0]!r:.100} for {self.task}; parameters: {known}")
        options: dict[str, Any] = {"top_k": 5, "function_to_apply": None, "threshold": 0.5} | parameters
        top_k, function, threshold = options["top_k"], options["function_to_apply"], options["threshold"]
        if function not in (None, "softmax", "sigmoid", "none"):
            raise ValueError(f"function_to_apply is {function!r:.100}; give softmax, sigmoid or none")
        try:
            count, share = 1 if top_k is None else int(top_k), float(threshold)
            if isinstance(top_k, bool) or isinstance(threshold, bool) or (isinstance(top_k, float) and top_k % 1):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            count, share = 0, 0.0
        if count < 1 or not 0 <= share <= 1:
            raise ValueError(
                f"top_k is {top_k!r:.100} and threshold {threshold!r:.100}; give a top_k of at least 1 and a threshold "
                "from 0 to 1, such as 5 and 0.5"
            )
        return options | {"top_k": None if top_k is None else count, "threshold": share}

    def _answer(
        self, sources: Sequence[Any], start: int, downloads: "_Downloads", options: dict[str, Any]
    ) -> list[Any]:
        """Return the answers for images from number `start` on, one by one in a dense task or if their sizes differ."""
        inputs = list[dict[str, Any]]()
        sizes = list[tuple[int, int]]()
        for number, source in enumerate(sources, start=start):
            image = _read(source, f"image {number}", downloads)  # kept until it is prepared, as it may have 200 MB
            inputs.append(self._prepare(image))
            sizes.append((image.height, image.width))
        compute = {"image-classification": self._classify, "image-feature-extraction": self._extract}.get(self.task)
        batches = inputs
        if compute is not None and len({each["pixel_values"].shape for each in inputs}) == 1:
            batches = [{name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}]
        answers: list[Any] = []
        for index, batch in enumerate(batches):
            with self.lock, torch.inference_mode():
                on_device = transformers.BatchFeature(batch).to(self.device, self.model.dtype)
                if compute is not None:
                    answers += compute(on_device, options)
                elif self.task == "image-segmentation":
                    answers.append(self._segment(on_device, sizes[index]))
                else:
                    answers.append(self._detect(on_device, sizes[index], options["threshold"]))
        return answers

    def _prepare(self, image: Image.Image) -> dict[str, Any]:
        """Return the model's inputs for one image: pixels, and what else its processor gives it, such as a mask."""
        if getattr(self.model.config, "num_channels", 3) == 1:
            image = image.convert("L")
        steps: dict[str, Any] = {}
        patch = getattr(self.model.config, "patch_stride", None)
        count = getattr(self.processor, "max_num_patches", None)
        if patch and count and self.task in ("image-classification", "image-feature-extraction"):
            h, w = _fill_grid((image.height, image.width), patch, count)
            size = {"height": h * patch[0], "width": w * patch[1]}
            steps = {"do_resize": True, "size": size, "do_center_crop": False}
        inputs = self.processor(images=image, return_tensors="pt", **steps)
        return {name: inputs[name] for name in inputs if name in self.input_names}

    def _classify(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> list[Any]:
        config = self.model.config
        logits = _to_finite(self.model(**inputs).logits)
        usual = "sigmoid" if config.problem_type == "multi_label_classification" else "softmax"
        function = options["function_to_apply"] or ("none" if self.is_regression else usual)
        scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid(), "none": logits}[function]
        order = scores.argsort(descending=True, stable=True)[:, : options["top_k"]].tolist()
        if self.is_regression:  # its outputs stay in order
            order = [range(scores.shape[1])] * len(scores)
        return [
            [{"label": config.id2label[index], "score": row[index]} for index in indices]
            for row, indices in zip(scores.tolist(), order, strict=True)
        ]

    def _extract(self, inputs: Mapping[str, Any], options: dict[str, Any]) -> list[Any]:
        """Return the pooled output of every image, else its class token, else the mean of its patches."""
        outputs = self.model(**inputs)
        pooled = getattr(outputs, "pooler_output", None)
        states = outputs.last_hidden_state
        if pooled is None:
            has_class_token = any(name.endswith("cls_token") for name, _ in self.model.named_parameters())
            num_others = getattr(self.model.config, "num_special_tokens", 0)  # registers
            pooled = states[:, 0] if has_class_token else states[:, num_others:].mean(1)
        return _to_finite(pooled.flatten(1)).tolist()

    def _compute(self, inputs: Mapping[str, Any]) -> Any:
        """Return a dense model's outputs in float32, as bfloat16 rounds boxes; processors find classes in NaN, too."""
        outputs = self.model(**inputs)
        for name in ("logits", "pred_boxes", "class_queries_logits", "masks_queries_logits"):
            if getattr(outputs, name, None) is not None:
                setattr(outputs, name, _to_finite(getattr(outputs, name)))
        return outputs

    def _segment(self, inputs: Mapping[str, Any], size: tuple[int, int]) -> list[dict[str, Any]]:
        """Return a mask for every class in one image of `size` (height, width) px."""
        canvas = _find_canvas(inputs, size)
        if getattr(self.processor, "do_pad", None) and getattr(self.processor, "do_split_image", None) is False:
            canvas = (max(size), max(size))  # EoMT's processor pads images to squares
        outputs = self._compute(inputs)
        target = round(canvas[0]), round(canvas[1])
        (classes,) = self.processor.post_process_semantic_segmentation(outputs, target_sizes=[target])
        classes = classes[: size[0], : size[1]]
        names = self.model.config.id2label
        return [
            {"label": names[index], "score": None, "mask": _encode_mask(classes == index)}
            for index in classes.unique().tolist()
            if index in names
        ]

    def _detect(self, inputs: Mapping[str, Any], size: tuple[int, int], threshold: float) -> list[dict[str, Any]]:
        """Return the objects in one image of `size` (height, width) px."""
        if hasattr(self.processor, "post_process_object_detection"):
            canvas = _find_canvas(inputs, size)  # boxes are shares of the padded image
            (objects,) = self.processor.post_process_object_detection(self._compute(inputs), threshold, [canvas])
        else:  # Mask R-CNN, which rescales boxes itself
            (objects,) = self.model(**inputs, target_sizes=[size]).detections
        answer: list[dict[str, Any]] = []
        for index in objects["scores"].argsort(descending=True, stable=True).tolist():
            score = float(objects["scores"][index])
            if score > threshold:
                label = self.model.config.id2label[int(objects["labels"][index])]
                sides = zip(("xmin", "ymin", "xmax", "ymax"), objects["boxes"][index].int().tolist(), strict=True)
                entry: dict[str, Any] = {"label": label, "score": score, "box": dict(sides)}
                if "masks" in objects:
                    entry["mask"] = _encode_mask(objects["masks"][index, 0] >= 0.5)
                answer.append(entry)
        return answer


def _find_auto_class(config: Any) -> str:
    """Return the name of the Auto class that loads the saved model with its head."""
    architecture = (config.architectures or [""])[0]
    targets = {name: str(target) for name, target in (getattr(config, "auto_map", None) or {}).items()}
    for name in TASKS:
        if targets.get(name, "").endswith(f".{architecture}") or name.removeprefix("AutoModel") in architecture:
            return name
    return "AutoModel"


def _fill_grid(size: tuple[int, int], patch: tuple[int, int], max_num_patches: int) -> tuple[int, int]:
    """Return the largest patch grid (h, w) with the shape of an image, as SigLIP 2's processor computes it.

    A copy of `hf_vit.data.transforms.fill_grid`, because this file runs without hf_vit; a test holds them equal.
    """

    def scale_grid(scale: float) -> tuple[int, int]:
        h, w = (max(1, math.ceil(side * scale / px)) for side, px in zip(size, patch, strict=True))
        return h, w

    low, high = 1e-6, 100.0
    while high - low >= 1e-5:
        scale = (low + high) / 2
        low, high = (scale, high) if math.prod(scale_grid(scale)) <= max_num_patches else (low, scale)
    return scale_grid(low)


def _find_canvas(inputs: Mapping[str, Any], size: tuple[int, int]) -> tuple[float, float]:
    """Return the (height, width) of a padded image in px of the image of this size, which `pixel_mask` shows in it."""
    if "pixel_mask" not in inputs:
        return size
    mask = inputs["pixel_mask"][0].float()
    return size[0] / float(mask[:, 0].mean()), size[1] / float(mask[0].mean())


def _to_finite(values: torch.Tensor) -> torch.Tensor:
    """Return values in float32 on the CPU; NaN and infinity are no JSON."""
    if not values.isfinite().all():
        raise ValueError("the model's outputs are not finite (NaN or infinity); its weights are damaged")
    return values.float().cpu()


def _encode_mask(mask: torch.Tensor) -> str:
    """Return a mask [H, W] as base64 of a PNG, 255 inside and 0 outside."""
    file = io.BytesIO()
    Image.fromarray(mask.cpu().numpy().astype(np.uint8) * 255).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def _read(source: Any, name: str, downloads: "_Downloads") -> Image.Image:
    """Return one image of a request as RGB.

    Raises:
        ValueError: it is no image, or too large.
    """
    if isinstance(source, str):
        is_url = re.match(r"https?:", source, re.IGNORECASE)
        source = downloads.read(source) if is_url else _decode_text(source, name)
    if not isinstance(source, bytes | bytearray | Image.Image):
        raise ValueError(f"{name} is of type {type(source).__name__}; {INPUTS}")
    try:
        if not isinstance(source, Image.Image):
            if len(source) > MAX_BYTES:
                raise ValueError(f"it has {len(source):,} bytes; the limit is {MAX_BYTES:,}")
            Image.init()
            source = Image.open(io.BytesIO(source), formats=[name for name in FORMATS if name in Image.OPEN])
        if source.width * source.height > MAX_PIXELS:
            raise ValueError(f"it has {source.width}x{source.height} px; the limit is {MAX_PIXELS:,} px")
        return _to_rgb(source)
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, ValueError, struct.error, ...
        reason = "its format is unknown" if isinstance(error, Image.UnidentifiedImageError) else f"{error!s:.200}"
        raise ValueError(f"{name} is not a readable image: {reason}") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    """Return 8-bit RGB as a viewer shows the image: rotated by its EXIF tag, on white, 16 bits scaled to 8."""
    image.load()
    tags = getattr(image, "tag_v2", {})  # of a TIFF file
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("it has floating-point values; save it with 8 bits")
    if image.mode.startswith("I"):
        full = 4095 if tags.get(258) == (12,) else 65535  # BitsPerSample
        values = np.asarray(image).astype(np.int32)  # 64 bits would take 1.5 GB for an image of 0.1 MB
        if values.min() < 0 or values.max() > full:
            raise ValueError(f"it has values from {values.min()} to {values.max()}; save it with 8 bits")
        values = full - values if tags.get(262) == 0 else values  # PhotometricInterpretation: 0 is white
        return Image.fromarray(((values * 255 + full // 2) // full).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


def _decode_text(text: str, name: str) -> bytes:
    """Return the bytes of base64 text, or of a data: URL with it. Text is never a path."""
    head, comma, body = text.partition(",")
    try:
        return base64.b64decode("".join((body if comma and head.startswith("data:") else text).split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{name} is neither valid base64 nor an https URL ({error}); {INPUTS}") from error


class _PublicConnection(http.client.HTTPSConnection):
    """HTTPS to a host whose addresses are all public: a request must not reach the server's own network."""

    def __init__(self, host: str, deadline: float) -> None:
        super().__init__(host, timeout=max(deadline - time.monotonic(), 0.001))
        self.deadline = deadline

    def connect(self) -> None:
        """Connect to the host by TLS; raise a ValueError if its address is not public."""
        # The checked address itself is connected to: another look-up could give another one.
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(self.host, self.port, socket.AF_INET)]
        if not all(ipaddress.ip_address(address).is_global for address in addresses):
            raise ValueError("the host's address is not public")
        plain = socket.create_connection((addresses[0], self.port), self.timeout)
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(plain, server_hostname=self.host, do_handshake_on_connect=False)
        if time.monotonic() > self.deadline:  # `stop` came before this socket
            raise TimeoutError("timed out")
        self.sock.do_handshake()

    def stop(self) -> None:
        """End a transfer that takes too long: a timeout limits single reads only."""
        with contextlib.suppress(OSError, AttributeError):
            self.sock.shutdown(socket.SHUT_RDWR)


class _Downloads:
    """Read the images of one request from https URLs of public hosts, within `REQUEST_SECONDS` together.

    Proxies, credentials, cookies and headers of the server are not used.
    """

    def __init__(self) -> None:
        self.seconds_left = float(REQUEST_SECONDS)

    def read(self, url: str) -> bytes:
        """Return the bytes behind a URL, within `SECONDS`, `MAX_BYTES` and `REDIRECTS`."""
        start = time.monotonic()
        try:
            if self.seconds_left <= 0:
                raise ValueError(f"the request's downloads take more than {REQUEST_SECONDS} s")
            return _download(url, start + min(SECONDS, self.seconds_left))
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = f"{error}; send its bytes or base64 instead"
            raise ValueError(f"the image at the URL cannot be read: {reason}") from error
        finally:
            self.seconds_left -= time.monotonic() - start


def _download(url: str, deadline: float) -> bytes:
    """Return the bytes behind an https URL; raise a ValueError, or an error of the connection."""
    for _ in range(1 + REDIRECTS):
        parts = urlsplit(url)
        if parts.scheme.lower() != "https" or not parts.hostname or parts.port not in (None, 443) or parts.username:
            raise ValueError("only https on port 443 without a user name is allowed")
        connection = _PublicConnection(parts.hostname, deadline)
        timer = threading.Timer(deadline - time.monotonic(), connection.stop)
        timer.start()
        try:
            connection.request("GET", (parts.path or "/") + (f"?{parts.query}" if parts.query else ""))
            response = connection.getresponse()
            content = response.read(MAX_BYTES + 1)
        finally:
            timer.cancel()
            connection.close()
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes")
        if response.status == http.HTTPStatus.OK:
            return content
        target = response.headers.get("Location")
        if target is None or not 300 <= response.status < 400:
            raise ValueError(f"the host answers with status {response.status}")
        url = urljoin(url, target)
    raise ValueError(f"more than {REDIRECTS} redirects")
