"""A certified graph in int8: quantised, judged by images that it has not seen, and certified again."""

import numpy as np
import torch

from hf_vit.conversion.targets.graphs.calibration import ACCURACY, AGREEMENT, Calibration
from hf_vit.conversion.targets.graphs.certificate import (
    NAME,
    RESULTS,
    Certificate,
    Quantization,
    compared_checks,
    result_of,
)
from hf_vit.conversion.targets.graphs.preprocessing import as_given
from hf_vit.conversion.targets.graphs.quantizing import QUANTIZERS, quantize_file
from hf_vit.conversion.targets.graphs.runtimes import Runtime
from hf_vit.conversion.targets.target import OutgoingModel
from hf_vit.errors import UserError

# Of results that are computed again elsewhere: a float that is rounded the other way is a whole step of int8.
TOLERANCE = 0.05


def in_int8(outgoing: OutgoingModel, runtime: Runtime, certificate: Certificate) -> Certificate:
    """Quantise the graph that a certificate is of; the certificate of what comes out.

    Its checks repeat the results of the quantised graph, without the image of NaN: a range that holds NaN is none.

    Raises:
        UserError: it answers too many held-out images otherwise, or too many wrongly.
    """
    mode, data = outgoing.quantize, outgoing.calibration
    assert mode is not None
    assert data is not None
    file, quantizer = outgoing.folder / runtime.file, QUANTIZERS[runtime.package]
    choice = quantize_file(quantizer, file, mode, data)
    agreement, accuracy, float_accuracy = _judged(outgoing, runtime, data)
    done = Quantization(
        mode=mode,
        data=data.data.name,
        data_fingerprint=data.data.fingerprint,
        calibration_images=len(data.ranging) + len(data.choosing),
        held_out_images=len(data.judging),
        agreement=agreement,
        accuracy=accuracy,
        float_accuracy=float_accuracy,
        layers=sum(map(len, choice.parts.values())),
        in_float={part: round(change, 5) for part, change in choice.in_float.items()},
    )
    lost = 0.0 if accuracy is None or float_accuracy is None else float_accuracy - accuracy
    if agreement < AGREEMENT or lost > ACCURACY:
        raise UserError(
            f"{done.describe()}; needed are {AGREEMENT:.1%} and at most {100 * ACCURACY:.1f} points less, so nothing "
            "is written: give more images (--calibrate), try the other --quantize, or leave it out"
        )
    checks = [check for check in certificate.checks if check.pixels != "not finite"]
    graph, takes = runtime.open(file), outgoing.takes
    results = [
        graph.run(as_given(takes, check.images()))["logits"]
        if check.compares == "results"
        else result_of(outgoing, check)
        for check in checks
    ]
    np.savez(outgoing.folder / RESULTS, *(result.numpy() for result in results))
    repeated = list(compared_checks(runtime, file, takes, checks, results))
    changed = {"sha256": runtime.sha256(file), "tolerance": TOLERANCE, "checks": repeated, "quantization": done}
    certificate = certificate.model_copy(update=changed)
    if not certificate.holds():
        raise UserError(
            f"in int8 the graph repeats nothing: {certificate.describe()}; nothing is written, please report"
        )
    certificate.write(outgoing.folder / NAME)
    return certificate


def _judged(outgoing: OutgoingModel, runtime: Runtime, data: Calibration) -> tuple[float, float | None, float | None]:
    """On held-out images: share answered as by the model, and the accuracy of graph and model where labels fit."""
    names = [outgoing.config.id2label[index] for index in range(outgoing.config.num_labels)]
    known = [names.index(name) if names.count(name) == 1 else -1 for name in data.data.label_names]
    classes = torch.tensor(known)
    graph = runtime.open(outgoing.folder / runtime.file)
    alike, right, right_in_float = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    with torch.no_grad():
        for given, pixel_values, labels in data.judging.labelled():
            ours, theirs = outgoing.outcome(pixel_values).argmax(-1), graph.run(given)["logits"].argmax(-1)
            alike.append(ours == theirs)
            right.append(theirs == classes[labels])
            right_in_float.append(ours == classes[labels])
    agreement, *accuracies = (float(torch.cat(each).double().mean()) for each in (alike, right, right_in_float))
    if -1 in known:
        return agreement, None, None
    return agreement, accuracies[0], accuracies[1]
