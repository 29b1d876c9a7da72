"""The scaling law finds parameters that are known, and its intervals hold them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import curve_fit
from scipy.stats import t as student

from hf_vit.cost import fit_scaling_law, plot_scaling_law, read_points
from hf_vit.errors import UserError

# arXiv 2106.04560: fits to fine-tuning and to 10-shot errors; a, b, c, d.
PUBLISHED = {"fine-tuned": (0.26, 0.35, 0.09, 0.01), "10-shot": (0.63, 0.32, 0.12, 0.52)}
NAMES = ("a", "b", "c", "d")


def points(truth: tuple[float, ...], number: int, noise: float = 0.0, seed: int = 0) -> list[tuple[float, float]]:
    """Errors of runs whose compute is spread evenly on a logarithmic scale, with Gaussian noise."""
    a, b, c, d = truth
    compute = np.geomspace(0.05, 1e4, number)
    errors = a * (compute + d) ** -b + c + noise * np.random.default_rng(seed).standard_normal(number)
    return list(zip(compute.tolist(), errors.tolist(), strict=True))


@pytest.mark.parametrize("truth", PUBLISHED.values(), ids=PUBLISHED)
@pytest.mark.parametrize("number", [5, 12])
def test_known_parameters_are_recovered(truth: tuple[float, ...], number: int) -> None:
    law = fit_scaling_law(points(truth, number))
    assert [getattr(law, name) for name in NAMES] == pytest.approx(truth, rel=1e-6)
    assert law.residual < 1e-12
    assert law.error(7.0) == pytest.approx(truth[0] * (7 + truth[3]) ** -truth[1] + truth[2])
    for name, value in zip(NAMES, truth, strict=True):
        assert law.intervals[name] == pytest.approx((value, value), rel=1e-5)


@pytest.mark.parametrize(("truth", "number"), [(PUBLISHED["fine-tuned"], 7), (PUBLISHED["10-shot"], 16)])
def test_the_intervals_hold_the_truth_as_often_as_they_say(truth: tuple[float, ...], number: int) -> None:
    """95% intervals of 100 noisy data sets: fewer than 88 that hold has a chance of 1 in 200 (binomial)."""
    laws = [fit_scaling_law(points(truth, number, noise=0.003, seed=seed)) for seed in range(100)]
    a, b, c, d = truth
    told = {name: (value, [law.intervals[name] for law in laws]) for name, value in zip(NAMES, truth, strict=True)}
    for compute in (1.0, 4e4):  # among the runs, and at four times the largest
        told[f"error at {compute:g}"] = a * (compute + d) ** -b + c, [law.interval(compute) for law in laws]
    for name, (value, intervals) in told.items():
        held = sum(low <= value <= high for low, high in intervals)
        assert held >= 88, f"{name}: {held} of 100"


def test_the_unit_of_compute_is_free() -> None:
    truth = PUBLISHED["10-shot"]
    runs = points(truth, 12)
    law = fit_scaling_law([(1e18 * compute, error) for compute, error in runs])
    assert law.d == pytest.approx(1e18 * truth[3], rel=1e-5)
    assert (law.b, law.c) == pytest.approx(truth[1:3], rel=1e-6)
    assert law.a == pytest.approx(truth[0] * 1e18 ** truth[1], rel=1e-4)


@pytest.mark.parametrize(
    ("shift", "truth", "number"), [(True, PUBLISHED["10-shot"], 12), (False, (0.25, 0.8, 1.2, 0.0), 8)]
)
def test_intervals_are_those_of_scipy(shift: bool, truth: tuple[float, ...], number: int) -> None:
    """The covariance that `scipy.optimize.curve_fit` gives for the same least squares, where no bound is met."""
    runs, count = points(truth, number, noise=0.003), 3 + shift
    law = fit_scaling_law(runs, shift=shift)

    def error(compute: Any, a: float, b: float, c: float, d: float = 0.0) -> Any:
        return a * (compute + d) ** -b + c

    found, covariance = curve_fit(error, *np.array(runs).T, p0=truth[:count])
    assert [getattr(law, name) for name in NAMES[:count]] == pytest.approx(found, rel=1e-4)
    assert (shift or law.d == 0, [*law.intervals]) == (True, [*NAMES[:count]])
    half = [(high - low) / 2 for low, high in law.intervals.values()]
    assert half == pytest.approx(np.sqrt(np.diag(covariance)) * student.ppf(0.975, number - count), rel=1e-3)
    assert np.array(law.covariance) == pytest.approx(covariance, rel=1e-2)
    assert shift or str(law).startswith(f"E = {law.a:.3g} C^-{law.b:.3g} + ")


def test_without_a_shift_four_runs_are_enough() -> None:
    law = fit_scaling_law(GOOD[:4], shift=False)
    assert law.intervals["b"][0] < law.b < law.intervals["b"][1]
    with pytest.raises(UserError, match=r"3 runs are too few, as the law has 3 parameters.*at least 4"):
        fit_scaling_law(GOOD[:3], shift=False)
    with pytest.raises(UserError, match=r"2 different computes, .* at least 3"):
        fit_scaling_law([*GOOD[:2], *GOOD[:2]], shift=False)


def test_a_limit_is_never_below_zero() -> None:
    law = fit_scaling_law([(compute, 0.5 * compute**-0.3 - 0.02) for compute in (1, 2, 4, 8, 16, 32)])
    assert law.c == 0
    assert law.intervals["c"][0] == 0


GOOD = [(1.0, 0.5), (2.0, 0.4), (4.0, 0.33), (8.0, 0.3), (16.0, 0.28)]


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        (GOOD[:4], "4 runs are too few.*at least 5"),
        ([], "0 runs are too few"),
        ([*GOOD, (0.0, 0.2)], "run 6 has a compute of 0"),
        ([*GOOD, (-3.0, 0.2)], "run 6 has a compute of -3"),
        ([*GOOD, (float("nan"), 0.2)], "run 6 has a compute of nan"),
        ([*GOOD, (float("inf"), 0.2)], "run 6 has a compute of inf"),
        ([*GOOD, (3.0, -0.2)], "run 6 has an error of -0.2"),
        ([*GOOD, (3.0, float("nan"))], "run 6 has an error of nan"),
        ([(1.0, 0.5), (1.0, 0.4), (2.0, 0.3), (2.0, 0.31), (3.0, 0.2)], "3 different computes"),
        ([(compute, 1 - error) for compute, error in GOOD], "does not fall"),
        *(([(compute, error) for compute, _ in GOOD], "does not fall") for error in (0.5, 0.3, 0.0)),
    ],
)
def test_runs_that_no_law_fits_are_refused(runs: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit_scaling_law(runs)


def test_tables_are_read(tmp_path: Path) -> None:
    table, objects, pairs = tmp_path / "runs.csv", tmp_path / "objects.json", tmp_path / "pairs.json"
    table.write_text("\ufeffname, compute, error\nfirst, 1e0, 0.5\n\nsecond, 2, .4\n", encoding="utf-8")
    objects.write_text(json.dumps([{"name": "first", "compute": 1, "error": 0.5}, {"compute": 2, "error": 0.4}]))
    pairs.write_text(" [[1, 0.5], [2, 0.4]]")
    for file in (table, objects, pairs):
        assert read_points(file) == GOOD[:2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "flops,error\n1,0.5\n", "columns flops, error.*name the columns compute and error"),
        ("a.csv", "", r"columns \(none\)"),
        ("a.csv", "compute,error\n1,0.5\n2,many\n", "a.csv, run 2.*not a pair of numbers"),
        ("a.csv", "compute,error\n1\n", "a.csv, run 1.*not a pair of numbers"),
        ("a.json", "[[1, 0.5], [2]]", "a.json, run 2.*not a pair of numbers"),
        ("a.json", '[{"compute": 1}]', "a.json, run 1.*not a pair of numbers"),
        ("a.json", '{"compute": 1, "error": 1}', "holds JSON, but not a list"),
        ("a.json", "[[1, 0.5]", "not valid JSON"),
        ("a.csv", b"\xff\xfe\x00\x01", "not UTF-8"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=message):
        read_points(tmp_path / name)


def test_a_source_that_is_given_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Its runs would count twice, and the intervals would be too narrow."""
    monkeypatch.chdir(tmp_path)
    for repeated in ("runs.csv", "model/facts.json"):
        code, _, err = command("scaling-law", tmp_path / "runs.csv", "model", "others.json", repeated)
        assert (code, err) == (1, f"hf-vit: {repeated} was given twice; give every run once\n")


def test_the_plot_is_a_picture_of_the_law(tmp_path: Path) -> None:
    from PIL import Image

    law = fit_scaling_law(GOOD)
    for name in ("first.png", "again.png"):
        plot_scaling_law(law, tmp_path / name)
    by_hand = dataclasses.replace(law, intervals={}, covariance=())
    plot_scaling_law(by_hand, tmp_path / "by_hand.png")
    assert (tmp_path / "by_hand.png").read_bytes() != (tmp_path / "first.png").read_bytes(), "no interval is drawn"
    with pytest.raises(UserError, match="was not fitted"):
        by_hand.interval(2.0)
    with Image.open(tmp_path / "first.png") as picture:
        assert picture.size == (660, 480)
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 50  # lines and points, not an empty page
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "again.png").read_bytes()
