"""How error falls with compute: E = a (C + d)^-b + c, fitted to recorded runs (arXiv 2106.04560).

c is the error that no compute removes; d bends the start of the curve, where a run hardly beats chance.
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

PARAMETERS = ("a", "b", "c", "d")  # d last: without a shift it is 0, and the other three are fitted
CONFIDENCE = 95  # %
_EXPONENTS = (0.02, 5.0)  # that are searched; published ones are 0.32 and 0.35
_STARTS = 12  # exponents, and shifts, that a fit starts from


@final
@dataclass(frozen=True)
class ScalingLaw:
    """A law, error = a * (compute + d) ** -b + c, fitted to points (compute, error).

    `intervals` are (low, high) of the fitted parameters, 95% by the covariance of the fit, which is empty if the law
    was not fitted; `residual` is the root mean squared one, in units of the error.
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
        """Return the law's error at a compute above 0: a number, or an array of them."""
        return _error((self.a, self.b, self.c, self.d), compute)

    def interval(self, compute: Any) -> tuple[Any, Any]:
        """Return (low, high) of the law's error with 95%, cut at 0, at a compute above 0 or an array of them.

        To first order of the fit's covariance, and if the law holds there, which the runs cannot tell. A run scatters
        around the law by the residual.

        Raises:
            UserError: the law was not fitted.
        """
        if not self.covariance:
            raise UserError("this law was not fitted and has no interval; use the result of fit_scaling_law")
        slopes = _slopes((self.a, self.b, self.c, self.d), compute)[: len(self.intervals)]
        variance = np.maximum(np.einsum("i...,ij,j...->...", slopes, np.array(self.covariance), slopes), 0.0)
        margin = np.sqrt(variance) * _student(len(self.points) - len(self.intervals))
        error = self.error(compute)
        return np.maximum(error - margin, 0.0), error + margin

    def __str__(self) -> str:
        compute = f"(C + {self.d:.2g})" if "d" in self.intervals else "C"
        return f"E = {self.a:.3g} {compute}^-{self.b:.3g} + {self.c:.3g}"


def fit_scaling_law(points: Sequence[tuple[float, float]], shift: bool = True) -> ScalingLaw:
    """Fit by least squares of the errors, every run weighing the same.

    The intervals are Student's t times the standard errors that the curvature of the squared residuals gives, cut at
    0. They tell of noise in the runs, not of whether the law holds beyond them.

    Args:
        points: (compute, error) of one run more than parameters; compute in any unit, which a and d take over.
        shift: whether d is fitted, 5 runs at least. Else it is 0, 4 at least: for runs that are all beyond the start
            of learning, which do not tell d from b.

    Raises:
        UserError: too few points or different computes, an impossible compute or error, or errors that do not fall.
    """
    names = PARAMETERS if shift else PARAMETERS[:-1]
    if len(points) <= len(names):
        raise UserError(
            f"{len(points)} runs are too few: the law has {len(names)} parameters, and its intervals need "
            f"one run more; give at least {len(names) + 1}"
        )
    for place, (x, y) in enumerate(points, start=1):
        if not 0 < x < np.inf:
            raise UserError(f"run {place} has a compute of {x:g}; it needs a finite number above 0")
        if not 0 <= y < np.inf:
            raise UserError(f"run {place} has an error of {y:g}; it needs a finite number of at least 0")
    different = len({x for x, _ in points})
    if different < len(names):
        raise UserError(f"the runs have {different} different computes; {len(names)} parameters need at least as many")
    compute, errors = np.array(points, dtype=np.float64).T
    unit = float(np.exp(np.log(compute).mean()))  # the search runs on numbers around 1
    a, b, c, d = _fit(compute / unit, errors, shift)
    parameters = np.array([a * unit**b, b, c, d * unit])
    fitted = _error(parameters, compute)
    if fitted.max() - fitted.min() <= 1e-9 * errors.max():
        raise UserError("the error does not fall as compute grows, so no scaling law can be fitted; check the columns")
    residuals = fitted - errors
    covariance, free = _covariance(parameters, compute, residuals, len(names)), parameters[: len(names)]
    margins = np.sqrt(np.diag(covariance)) * _student(len(errors) - len(names))
    low, high = np.maximum(free - margins, 0.0).tolist(), (free + margins).tolist()
    return ScalingLaw(
        *parameters.tolist(),
        intervals={name: (low[place], high[place]) for place, name in enumerate(names)},
        residual=float(np.sqrt(np.mean(residuals**2))),
        points=tuple(zip(compute.tolist(), errors.tolist(), strict=True)),
        covariance=tuple(map(tuple, covariance.tolist())),
    )


def plot_scaling_law(law: ScalingLaw, path: Path, unit: str = "exaFLOPs") -> None:
    """Draw runs and law, both axes logarithmic, into a PNG file."""
    from hf_vit.results.figures import new_figure, save_figure

    figure = new_figure(5.5, 4)
    axes = figure.add_subplot()
    compute, errors = np.array(law.points).T
    curve = np.geomspace(compute.min() / 2, compute.max() * 2, 200)
    axes.plot(curve, law.error(curve), label=str(law))
    axes.plot(compute, errors, "o", label=f"{len(errors)} runs")
    axes.set(xscale="log", yscale="log", xlabel=f"compute C ({unit})", ylabel="error E")
    if law.covariance:
        axes.set_ylim(axes.get_ylim())  # an interval may reach down to 0
        axes.fill_between(curve, *law.interval(curve), alpha=0.2, label=f"its {CONFIDENCE}%")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _fit(compute: Array, errors: Array, shift: bool) -> tuple[float, float, float, float]:
    """Return (a, b, c, d) of the least squares: b and d are searched in logarithms, a and c follow linearly."""
    from scipy.optimize import least_squares

    searched = [_EXPONENTS, (1e-4 * compute.min(), 10 * compute.max())][: 1 + shift]
    low, high = np.log(searched).T

    def parameters(logarithms: Array) -> tuple[float, float, float, float]:
        b, d = (*np.exp(logarithms).tolist(), 0.0)[:2]
        a, c = _linear((compute + d) ** -b, errors)
        return a, b, c, d

    def residuals(logarithms: Array) -> Array:
        return _error(parameters(logarithms), compute) - errors

    places = np.stack(np.meshgrid(*np.linspace(low, high, _STARTS).T), axis=-1).reshape(-1, len(low))
    starts = sorted(places, key=lambda place: float(np.square(residuals(place)).sum()))[:3]
    results = [
        least_squares(residuals, place, bounds=(low, high), xtol=1e-12, ftol=1e-12, gtol=1e-12) for place in starts
    ]
    return parameters(min(results, key=lambda result: result.cost).x)


def _linear(powers: Array, errors: Array) -> tuple[float, float]:
    """Return the a and c, of at least 0, that are best for errors = a * powers + c."""
    centred = powers - powers.mean()
    a = float(max(centred @ errors / (centred @ centred), 0.0))
    c = float(errors.mean() - a * powers.mean())
    return (a, c) if c >= 0 else (float(powers @ errors / (powers @ powers)), 0.0)


def _error(parameters: Iterable[float], compute: Any) -> Any:
    a, b, c, d = parameters
    return a * (compute + d) ** -b + c


def _slopes(parameters: Iterable[float], compute: Any) -> Array:
    """Return the slopes of the error by a, b, c and d: [4, ...]."""
    a, b, _, d = parameters
    powers = (compute + d) ** -b
    return np.stack([powers, -a * np.log(compute + d) * powers, np.ones_like(powers), -a * b * powers / (compute + d)])


def _covariance(parameters: Array, compute: Array, residuals: Array, count: int) -> Array:
    """Return that of the fitted parameters: the inverse of J'J, times the variance of the residuals."""
    slopes = _slopes(parameters, compute)[:count].T
    sizes = np.linalg.norm(slopes, axis=0)
    _, singular, directions = np.linalg.svd(slopes / sizes, full_matrices=False)
    # What the runs do not tell apart has no slope: its interval becomes huge, not small.
    singular = np.maximum(singular, np.finfo(float).eps)
    spread = directions / singular[:, None] / sizes
    variance = residuals @ residuals / (len(compute) - count)
    return variance * spread.T @ spread


def _student(freedom: int) -> float:
    """Return how many standard errors the interval reaches to either side, for so many runs more than parameters."""
    from scipy.stats import t

    return float(t.ppf(0.5 + CONFIDENCE / 200, freedom))


COLUMNS = ("compute", "error")


def read_points(source: str | os.PathLike[str]) -> list[tuple[float, float]]:
    """Return (compute, error) of every run in one source.

    Args:
        source: a CSV file with the columns compute and error; a JSON file, a list of [compute, error] or of objects
            with these two; or the folder (or its facts.json) of a trained model, which gives exaFLOPs of its training
            and 1 - top-1 accuracy of the evaluation after it.

    Raises:
        UserError: it is none of these, or a value in it is no number.
    """
    path = Path(source).expanduser()
    if path.is_dir() or path.name == FACTS_NAME:
        folder = path if path.is_dir() else path.parent
        if (run := measured_run(folder)) is None:
            raise UserError(f"{folder} has no training record in facts.json; give the folder of a trained model")
        if run.error is None:
            raise UserError(f"{folder} has no evaluation record after its training; run hf-vit evaluate on it first")
        return [(run.training_flops / 1e18, run.error)]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(f"there is no {source}; give CSV or JSON files, or folders of trained models") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 text; give CSV or JSON files, or folders of trained models") from error
    if text.lstrip()[:1] in ("[", "{"):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path.name} is not valid JSON ({error}); write it again") from error
        if not isinstance(entries, list):
            example = '[{"compute": 1, "error": 0.5}, ...] or [[1, 0.5], ...]'
            raise UserError(f"{path.name} holds no list; write {example}")
    else:
        rows = csv.DictReader(text.splitlines(), skipinitialspace=True)
        if not set(COLUMNS) <= set(rows.fieldnames or ()):
            raise UserError(
                f"{path.name} has the columns {', '.join(rows.fieldnames or ()) or '(none)'}; a first line must name "
                f"{' and '.join(COLUMNS)}"
            )
        entries = list(rows)
    if not entries:
        raise UserError(f"{source} holds no runs; give lines with compute and error")
    points = list[tuple[float, float]]()
    for place, entry in enumerate(cast("list[Any]", entries), start=1):
        try:
            compute, error = (entry[name] for name in COLUMNS) if isinstance(entry, dict) else entry
            points.append((float(compute), float(error)))
        except (KeyError, TypeError, ValueError) as reason:
            where = f"{path.name}, run {place}"
            raise UserError(f"{where}: {entry!r:.80} is not a pair of numbers (compute and error)") from reason
    return points
