"""How error falls with compute: E = a (C + d)^-b + c, fitted to recorded runs (arXiv 2106.04560).

c is the error that no compute removes; d bends the start of the curve, where a run hardly beats chance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from hf_vit.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PARAMETERS = ("a", "b", "c", "d")  # d last: without a shift it is 0, and the other three are fitted
CONFIDENCE = 95  # %
_EXPONENTS = (0.02, 5.0)  # that are searched; published ones are 0.32 and 0.35
_STARTS = 12  # exponents, and shifts, that a fit starts from


@final
@dataclass(frozen=True)
class ScalingLaw:
    """A fitted law.

    Attributes:
        a, b, c, d: error = a * (compute + d) ** -b + c.
        intervals: fitted parameter -> (low, high), 95% by the covariance of the fit.
        residual: root mean squared residual, in units of the error.
        points: (compute, error), as given.
        covariance: of the fitted parameters, in their order; empty if the law was not fitted.
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
        """The law's error at a compute above 0: a number, or an array of them."""
        return _error((self.a, self.b, self.c, self.d), compute)

    def interval(self, compute: Any) -> tuple[Any, Any]:
        """(low, high) of the law's error with 95%, cut at 0, at a compute above 0 or an array of them.

        To first order of the fit's covariance, and if the law holds there, which the runs cannot tell. A run scatters
        around the law by the residual.

        Raises:
            UserError: the law was not fitted.
        """
        if not self.covariance:
            raise UserError("this law was not fitted and has no interval; use the result of fit_scaling_law")
        import numpy as np

        slopes = _slopes((self.a, self.b, self.c, self.d), compute)[: len(self.intervals)]
        variance = np.maximum(np.einsum("i...,ij,j...->...", slopes, np.array(self.covariance), slopes), 0.0)
        margin = np.sqrt(variance) * _student(len(self.points) - len(self.intervals))
        error = self.error(compute)
        return np.maximum(error - margin, 0.0), error + margin

    def __str__(self) -> str:
        compute = f"(C + {self.d:.2g})" if "d" in self.intervals else "C"
        return f"E = {self.a:.3g} {compute}^-{self.b:.3g} + {self.c:.3g}"


def fit_scaling_law(points: Sequence[tuple[float, float]], shift: bool = True) -> ScalingLaw:
    """Least squares of the errors, every run weighing the same.

    The intervals are Student's t times the standard errors that the curvature of the squared residuals gives, cut at
    0. They tell of noise in the runs, not of whether the law holds beyond them.

    Args:
        points: (compute, error) of one run more than parameters; compute in any unit, which a and d take over.
        shift: whether d is fitted, 5 runs at least. Else it is 0, 4 at least: for runs that are all beyond the start
            of learning, which do not tell d from b.

    Raises:
        UserError: too few points or different computes, an impossible compute or error, or errors that do not fall.
    """
    import numpy as np

    names = PARAMETERS if shift else PARAMETERS[:-1]
    compute, errors = _checked(points, len(names))
    unit = float(np.exp(np.log(compute).mean()))  # the search runs on numbers around 1
    a, b, c, d = _fit(compute / unit, errors, shift)
    found = np.array([a * unit**b, b, c, d * unit])
    fitted = _error(found, compute)
    if fitted.max() - fitted.min() <= 1e-9 * errors.max():
        raise UserError("the error does not fall as compute grows, so no scaling law can be fitted; check the columns")
    residuals = fitted - errors
    covariance, free = _covariance(found, compute, residuals, len(names)), found[: len(names)]
    margins = np.sqrt(np.diag(covariance)) * _student(len(errors) - len(names))
    low, high = np.maximum(free - margins, 0.0).tolist(), (free + margins).tolist()
    return ScalingLaw(
        *found.tolist(),
        intervals={name: (low[place], high[place]) for place, name in enumerate(names)},
        residual=float(np.sqrt(np.mean(residuals**2))),
        points=tuple(zip(compute.tolist(), errors.tolist(), strict=True)),
        covariance=tuple(map(tuple, covariance.tolist())),
    )


def plot_scaling_law(law: ScalingLaw, path: Path, unit: str = "exaFLOPs") -> None:
    """Draw runs and law, both axes logarithmic, into a PNG file."""
    import numpy as np

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


def _checked(points: Sequence[tuple[float, float]], parameters: int) -> "tuple[Array, Array]":
    import numpy as np

    if len(points) <= parameters:
        raise UserError(
            f"{len(points)} runs are too few: the law has {parameters} parameters, and its intervals need "
            f"one run more; give at least {parameters + 1}"
        )
    for place, (compute, error) in enumerate(points):
        if not (compute > 0 and np.isfinite(compute)):
            raise UserError(f"run {place + 1} has a compute of {compute:g}; it needs a finite number above 0")
        if not (error >= 0 and np.isfinite(error)):
            raise UserError(f"run {place + 1} has an error of {error:g}; it needs a finite number of at least 0")
    different = len({compute for compute, _ in points})
    if different < parameters:
        raise UserError(f"the runs have {different} different computes; {parameters} parameters need at least as many")
    compute, errors = np.array(points, dtype=np.float64).T
    return compute, errors


def _fit(compute: "Array", errors: "Array", shift: bool) -> tuple[float, float, float, float]:
    """(a, b, c, d) of the least squares: b and d are searched in logarithms, a and c follow linearly from them."""
    import numpy as np
    from scipy.optimize import least_squares

    searched = [_EXPONENTS, (1e-4 * compute.min(), 10 * compute.max())][: 1 + shift]
    low, high = np.log(searched).T

    def parameters(logarithms: "Array") -> tuple[float, float, float, float]:
        b, d = (*np.exp(logarithms).tolist(), 0.0)[:2]
        a, c = _linear((compute + d) ** -b, errors)
        return a, b, c, d

    def residuals(logarithms: "Array") -> "Array":
        return _error(parameters(logarithms), compute) - errors

    places = np.stack(np.meshgrid(*np.linspace(low, high, _STARTS).T), axis=-1).reshape(-1, len(low))
    starts = sorted(places, key=lambda place: float(np.square(residuals(place)).sum()))[:3]
    results = [
        least_squares(residuals, place, bounds=(low, high), xtol=1e-12, ftol=1e-12, gtol=1e-12) for place in starts
    ]
    return parameters(min(results, key=lambda result: result.cost).x)


def _linear(powers: "Array", errors: "Array") -> tuple[float, float]:
    """The a and c, of at least 0, that are best for errors = a * powers + c."""
    centred = powers - powers.mean()
    a = float(max(centred @ errors / (centred @ centred), 0.0))
    c = float(errors.mean() - a * powers.mean())
    return (a, c) if c >= 0 else (float(powers @ errors / (powers @ powers)), 0.0)


def _error(found: Iterable[float], compute: Any) -> Any:
    a, b, c, d = found
    return a * (compute + d) ** -b + c


def _slopes(found: Iterable[float], compute: Any) -> "Array":
    """Of the error by a, b, c and d: [4, ...]."""
    import numpy as np

    a, b, _, d = found
    powers = (compute + d) ** -b
    return np.stack([powers, -a * np.log(compute + d) * powers, np.ones_like(powers), -a * b * powers / (compute + d)])


def _covariance(found: "Array", compute: "Array", residuals: "Array", parameters: int) -> "Array":
    """Of the fitted ones of (a, b, c, d): the inverse of J'J, times the variance of the residuals."""
    import numpy as np

    slopes = _slopes(found, compute)[:parameters].T
    sizes = np.linalg.norm(slopes, axis=0)
    _, singular, directions = np.linalg.svd(slopes / sizes, full_matrices=False)
    # What the runs do not tell apart has no slope: its interval becomes huge, not small.
    singular = np.maximum(singular, np.finfo(float).eps)
    spread = directions / singular[:, None] / sizes
    variance = residuals @ residuals / (len(compute) - parameters)
    return variance * spread.T @ spread


def _student(freedom: int) -> float:
    """How many standard errors the interval reaches to either side, for so many runs more than parameters."""
    from scipy.stats import t

    return float(t.ppf(0.5 + CONFIDENCE / 200, freedom))
