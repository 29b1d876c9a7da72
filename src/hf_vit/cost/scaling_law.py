"""Fit the scaling law E = a (C + d)^-b + c of error E and compute C to recorded runs (arXiv 2106.04560).

c is the error that remains at any compute; d flattens the start of the curve, where runs are hardly better than chance.
"""

import csv
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from hf_vit.cost.trainings import measured_run
from hf_vit.errors import UserError
from hf_vit.results.facts import FACTS_NAME

Array = NDArray[np.float64]

PARAMETERS = ("a", "b", "c", "d")  # d is last, as without a shift it is 0 and only the first three are fitted
CONFIDENCE = 95  # %
_EXPONENTS = (0.02, 5.0)  # range of the search; published exponents are 0.32 and 0.35
_STARTS = 12  # number of exponents, and of shifts, from which the search starts


@final
@dataclass(frozen=True)
class ScalingLaw:
    """The law error = a * (compute + d) ** -b + c, and the points (compute, error) that it was fitted to.

    Attributes:
        intervals: 95% interval (low, high) of every fitted parameter, from the fit's covariance.
        residual: root mean squared residual, in units of the error.
        points: the runs.
        covariance: covariance of the fitted parameters; empty if the law was not fitted.
    """

    a: float
    b: float
    c: float
    d: float
    intervals: dict[str, tuple[float, float]]
    residual: float
    points: tuple[tuple[float, float], ...]
    covariance: tuple[tuple[float, ...], ...] = ()

    def error(self, compute: Any) -> Any:
        """Return the law's error at a compute above 0: a number, or an array for an array."""
        return _compute_error((self.a, self.b, self.c, self.d), compute)

    def interval(self, compute: Any) -> tuple[Any, Any]:
        """Return the 95% interval (low, high) of the law's error, at least 0, at one compute or at each of an array.

        The interval is a first-order approximation from the fit's covariance. It assumes that the law holds at this
        compute, and does not include the scatter of single runs, which is the residual.

        Raises:
            UserError: the law was not fitted.
        """
        if not self.covariance:
            raise UserError("this law was not fitted and has no interval; use the result of fit_scaling_law")
        derivatives = _differentiate((self.a, self.b, self.c, self.d), compute)[: len(self.intervals)]
        # The variance of the error is g' V g, with the derivatives g and the covariance V of the parameters.
        variance = np.maximum(np.einsum("i...,ij,j...->...", derivatives, np.array(self.covariance), derivatives), 0.0)
        margin = np.sqrt(variance) * _compute_student_quantile(len(self.points) - len(self.intervals))
        error = self.error(compute)
        return np.maximum(error - margin, 0.0), error + margin

    def __str__(self) -> str:
        compute = f"(C + {self.d:.2g})" if "d" in self.intervals else "C"
        return f"E = {self.a:.3g} {compute}^-{self.b:.3g} + {self.c:.3g}"


def fit_scaling_law(points: Sequence[tuple[float, float]], shift: bool = True) -> ScalingLaw:
    """Fit the law by least squares of the errors; every run has the same weight.

    Intervals are Student's t times the standard errors from the curvature of the squared residuals, cut at 0. They
    express noise in the runs, not whether the law holds beyond them.

    Args:
        points: (compute, error) of at least one run more than parameters; a and d use the unit of compute.
        shift: fit d, which needs at least 5 runs. False sets it to 0 and needs 4 runs; use it if all runs are beyond
            the start of learning, as such runs cannot distinguish d from b.

    Raises:
        UserError: there are too few points or different computes, a value is out of range, or the errors do not fall.
    """
    names = PARAMETERS if shift else PARAMETERS[:-1]
    if len(points) <= len(names):
        raise UserError(
            f"{len(points)} runs are too few, as the law has {len(names)} parameters and its intervals need "
            f"one run more; give at least {len(names) + 1}"
        )
    for index, (x, y) in enumerate(points, start=1):
        if not 0 < x < np.inf:
            raise UserError(f"run {index} has a compute of {x:g}; give a finite number above 0")
        if not 0 <= y < np.inf:
            raise UserError(f"run {index} has an error of {y:g}; give a finite number of at least 0")
    num_computes = len({x for x, _ in points})
    if num_computes < len(names):
        raise UserError(
            f"the runs have only {num_computes} different computes, but the law has {len(names)} parameters; "
            f"give runs with at least {len(names)} different computes"
        )
    compute, errors = np.array(points, dtype=np.float64).T
    unit = float(np.exp(np.log(compute).mean()))  # normalizes the search to numbers around 1
    a, b, c, d = _fit(compute / unit, errors, shift)
    parameters = np.array([a * unit**b, b, c, d * unit])
    predictions = _compute_error(parameters, compute)
    if predictions.max() - predictions.min() <= 1e-9 * errors.max():
        raise UserError(
            "the error does not fall as compute grows, so no scaling law can be fitted; check that the "
            "columns compute and error are not swapped"
        )
    residuals = predictions - errors
    covariance = _estimate_covariance(parameters, compute, residuals, len(names))
    fitted_parameters = parameters[: len(names)]
    margins = np.sqrt(np.diag(covariance)) * _compute_student_quantile(len(errors) - len(names))
    low = np.maximum(fitted_parameters - margins, 0.0).tolist()
    high = (fitted_parameters + margins).tolist()
    return ScalingLaw(
        *parameters.tolist(),
        intervals={name: (low[index], high[index]) for index, name in enumerate(names)},
        residual=float(np.sqrt(np.mean(residuals**2))),
        points=tuple(zip(compute.tolist(), errors.tolist(), strict=True)),
        covariance=tuple(map(tuple, covariance.tolist())),
    )


def plot_scaling_law(law: ScalingLaw, path: Path, unit: str = "exaFLOPs") -> None:
    """Plot runs and law with logarithmic axes into a PNG file."""
    from hf_vit.results.figures import make_figure, save_figure

    figure = make_figure(5.5, 4)
    axes = figure.add_subplot()
    compute, errors = np.array(law.points).T
    curve = np.geomspace(compute.min() / 2, compute.max() * 2, 200)
    axes.plot(curve, law.error(curve), label=str(law))
    axes.plot(compute, errors, "o", label=f"{len(errors)} runs")
    axes.set(xscale="log", yscale="log", xlabel=f"compute C ({unit})", ylabel="error E")
    if law.covariance:
        axes.set_ylim(axes.get_ylim())  # keeps the limits, as an interval may reach down to 0
        axes.fill_between(curve, *law.interval(curve), alpha=0.2, label=f"{CONFIDENCE}% interval")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _fit(compute: Array, errors: Array, shift: bool) -> tuple[float, float, float, float]:
    """Return (a, b, c, d) of the least squares fit; b and d are searched in logarithms, a and c follow linearly."""
    from scipy.optimize import least_squares

    ranges = [_EXPONENTS, (1e-4 * compute.min(), 10 * compute.max())][: 1 + shift]
    low, high = np.log(ranges).T

    def parameters(logarithms: Array) -> tuple[float, float, float, float]:
        """Return (a, b, c, d) for logarithms of b and d."""
        b, d = (*np.exp(logarithms).tolist(), 0.0)[:2]
        a, c = _fit_linear((compute + d) ** -b, errors)
        return a, b, c, d

    def residuals(logarithms: Array) -> Array:
        return _compute_error(parameters(logarithms), compute) - errors

    grid_points = np.stack(np.meshgrid(*np.linspace(low, high, _STARTS).T), axis=-1).reshape(-1, len(low))
    starts = sorted(grid_points, key=lambda start: float(np.square(residuals(start)).sum()))[:3]
    results = [
        least_squares(residuals, start, bounds=(low, high), xtol=1e-12, ftol=1e-12, gtol=1e-12) for start in starts
    ]
    return parameters(min(results, key=lambda result: result.cost).x)


def _fit_linear(powers: Array, errors: Array) -> tuple[float, float]:
    """Return the a and c of at least 0 that fit errors = a * powers + c best."""
    deviations = powers - powers.mean()
    a = float(max(deviations @ errors / (deviations @ deviations), 0.0))
    c = float(errors.mean() - a * powers.mean())
    return (a, c) if c >= 0 else (float(powers @ errors / (powers @ powers)), 0.0)


def _compute_error(parameters: Iterable[float], compute: Any) -> Any:
    """Return the error of the law with parameters (a, b, c, d)."""
    a, b, c, d = parameters
    return a * (compute + d) ** -b + c


def _differentiate(parameters: Iterable[float], compute: Any) -> Array:
    """Return the derivatives [4, ...] of the error with respect to a, b, c and d."""
    a, b, _, d = parameters
    shifted_compute = compute + d
    powers = shifted_compute**-b
    by_b = -a * np.log(shifted_compute) * powers
    by_d = -a * b * powers / shifted_compute
    return np.stack([powers, by_b, np.ones_like(powers), by_d])


def _estimate_covariance(parameters: Array, compute: Array, residuals: Array, count: int) -> Array:
    """Return the covariance of the first `count` parameters: the inverse of J'J times the variance of the residuals."""
    derivatives = _differentiate(parameters, compute)[:count].T
    norms = np.linalg.norm(derivatives, axis=0)
    _, singular_values, directions = np.linalg.svd(derivatives / norms, full_matrices=False)
    # Directions that the runs do not determine have a singular value of 0; the bound makes their intervals huge.
    singular_values = np.maximum(singular_values, np.finfo(float).eps)
    scaled_directions = directions / singular_values[:, None] / norms
    variance = residuals @ residuals / (len(compute) - count)
    return variance * scaled_directions.T @ scaled_directions


def _compute_student_quantile(degrees_of_freedom: int) -> float:
    """Return the half-width of the interval in standard errors for this many degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf(0.5 + CONFIDENCE / 200, degrees_of_freedom))


COLUMNS = ("compute", "error")


def read_points(source: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """Return (compute, error) of every run in one source.

    Args:
        source: a CSV file with the columns compute and error; a JSON list of [compute, error] or of objects with these
            two keys; or the folder (or its facts.json) of a trained model, which gives the exaFLOPs of its training and
            1 - top-1 accuracy of the evaluation after it.

    Raises:
        UserError: the source is none of these, or a value in it is not a number.
    """
    path = Path(source).expanduser()
    if path.is_dir() or path.name == FACTS_NAME:
        folder = path if path.is_dir() else path.parent
        run = measured_run(folder)
        if run is None:
            raise UserError(f"{folder} has no training with steps in facts.json; give the folder of a trained model")
        if run.error is None:
            raise UserError(
                f"{folder} has no evaluation record after its training; run hf-vit evaluate on the model first"
            )
        return [(run.training_flops / 1e18, run.error)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"{source} does not exist; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text; give CSV or JSON files, or folders of trained models") from error
    parse = _parse_json_runs if text.lstrip()[:1] in ("[", "{") else _parse_csv_runs
    entries = parse(text, path.name)
    if not entries:
        raise UserError(f"{source} contains no runs; add some, each with compute and error")
    points = list[tuple[float, float]]()
    for index, entry in enumerate(entries, start=1):
        try:
            compute, error = (entry[name] for name in COLUMNS) if isinstance(entry, dict) else entry
            points.append((float(compute), float(error)))
        except (KeyError, TypeError, ValueError) as reason:
            location = f"{path.name}, run {index}"
            raise UserError(f"{location}: {entry!r:.80} is not a pair of numbers; give compute and error") from reason
    return points


def _parse_json_runs(text: str, file_name: str) -> list[Any]:
    """Return the entries of a JSON list."""
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file_name} is not valid JSON; correct the file ({error})") from error
    if not isinstance(entries, list):
        example = '[{"compute": 1, "error": 0.5}, ...] or [[1, 0.5], ...]'
        raise UserError(f"{file_name} holds JSON, but not a list; write {example}")
    return cast("list[Any]", entries)


def _parse_csv_runs(text: str, file_name: str) -> list[Any]:
    """Return the rows of a CSV file as column -> text."""
    rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
    if not set(COLUMNS) <= set(rows.fieldnames or ()):
        raise UserError(
            f"{file_name} has the columns {', '.join(rows.fieldnames or ()) or '(none)'}; name the columns "
            f"{' and '.join(COLUMNS)} in the first line"
        )
    return list(rows)
