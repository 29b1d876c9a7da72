"""facts.json: what goes in comes out, damage is told, nothing personal gets in, nothing is lost."""

import getpass
import json
import os
import platform
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_vit.environment import list_versions, pick_device, read_hardware
from hf_vit.errors import UserError
from hf_vit.results.documents import Measurements
from hf_vit.results.facts import DataFact, Facts, Record, append_record, is_recorded, make_record

TOKEN = "hf_" + "Qw3rTy" * 6


def _record(**changes: object) -> Record:
    fields: dict[str, object] = {"command": ["hf-vit", "evaluate"], "seed": 0, "values": {"top1": 0.5}, **changes}
    return make_record("evaluation", **fields)  # type: ignore[arg-type]


def test_records_come_back_as_written_from_a_sorted_list(tmp_path: Path) -> None:
    assert Facts.load(tmp_path).records == []
    data = DataFact(name="digits", fingerprint="abc", split="test", size=360)
    before = datetime.now(UTC).replace(microsecond=0)
    append_record(tmp_path, _record(data=data, seconds=1.23456, values={"top1": 0.9, "names": ["a", "é"], "n": None}))
    append_record(tmp_path, _record(values={"top1": 0.95}))
    first, second = Facts.load(tmp_path).records
    assert (first.data, first.seconds, second.values["top1"]) == (data, 1.235, 0.95)
    assert first.values == {"top1": 0.9, "names": ["a", "é"], "n": None}
    assert before <= first.date <= datetime.now(UTC)
    assert Facts().filter_kind("training") == []
    record, _ = json.loads((tmp_path / "facts.json").read_text())
    names = "command data date hardware kind seconds seed values versions weights"
    assert [*record] == names.split()
    assert list(record["values"]) == ["n", "names", "top1"]
    assert datetime.fromisoformat(record["date"]).utcoffset() is not None


def test_unknown_fields_and_kinds_survive(tmp_path: Path) -> None:
    append_record(tmp_path, _record(data=DataFact(name="d")))
    path = tmp_path / "facts.json"
    records = json.loads(path.read_text())
    records[0] |= {"kind": "dreaming", "from_the_future": {"x": [1]}}
    records[0]["data"]["licence"] = "cc0"
    path.write_text(json.dumps(records))
    append_record(tmp_path, _record())
    kept = json.loads(path.read_text())
    assert kept[0] == records[0]
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "EOF"), (b"[{", "EOF"), (b'{"records": []}', "valid array"), (b'[{"kind": "training"}]', "0.command"),
        (b'[{"kind": "training", "command": "x", "date": "yesterday"}]', "0.date"),
        (b'[{"kind": "training", "command": "x", "date": "2031-02-03T00:00:00Z", "seconds": NaN}]', "0.seconds"),
        (b"\xff\xfe\x00", "UTF-8"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_left_alone(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "facts.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"facts\.json is damaged .*move it away") as caught:
        append_record(tmp_path, _record())
    assert reason in str(caught.value)
    assert path.read_bytes() == content


def test_what_cannot_be_written_leaves_the_old_file_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="does not exist"):
        append_record(tmp_path / "nowhere", _record())
    append_record(tmp_path, _record())
    before = (tmp_path / "facts.json").read_bytes()

    def full_disk(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(UserError, match=r"facts\.json cannot be written: No space left"):
        append_record(tmp_path, _record())
    assert (tmp_path / "facts.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["facts.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "facts.json").stat().st_mode) == 0o666 & ~umask, "others can read it"


def test_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    # Threads stand for processes: the lock belongs to an open folder, of which every append has its own.
    def append_many(seed: int) -> None:
        for index in range(8):
            append_record(tmp_path, Record(kind="benchmark", command=str(index), date=datetime.now(UTC), seed=seed))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append_many, range(6)))
    written = [(record.seed, record.command) for record in Facts.load(tmp_path).records]
    assert sorted(written) == [(seed, str(index)) for seed in range(6) for index in range(8)]
    assert os.listdir(tmp_path) == ["facts.json"]


def test_nothing_personal_gets_into_a_record(tmp_path: Path) -> None:
    record = make_record(
        "training",
        values={"base": tmp_path / "base", "note": f"loaded {tmp_path}/a.png, half 1/2", str(tmp_path): {"x": ["y"]}},
        command=[f"{tmp_path}/hf-vit", "finetune", f"--data={tmp_path}/d"],
        data=DataFact(name=f"{tmp_path}/images", fingerprint="f"),
    )
    text = record.model_dump_json()
    assert record.values["note"] == "loaded a.png, half 1/2"
    assert record.data is not None
    assert record.data.name == "images"
    for private in {
        str(tmp_path),
        *(f"{sign}{name}" for sign in '"/' for name in (platform.node(), getpass.getuser())),
    }:
        assert private not in text


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training script's own arguments, and records that somebody else made."""
    monkeypatch.setattr("sys.argv", ["/home/ann/run.py", "--hub_token", TOKEN, "--wandb-key=abc123", "--seed", "1"])
    record = make_record("training", values={"recipe": {"hub_token": "s3cret"}})
    assert record.command == "python run.py --hub_token REDACTED --wandb-key=REDACTED --seed 1"
    foreign = Record(kind="training", command=f"train --hub_token {TOKEN}", date=datetime.now(UTC), values={"x": TOKEN})
    Facts(records=[record, foreign]).save(tmp_path)
    text = (tmp_path / "facts.json").read_text()
    assert not any(secret in text for secret in (TOKEN, "abc123", "s3cret", "/home/ann"))
    assert Facts.load(tmp_path).records[0] == record


def test_arrays_become_numbers_and_nan_a_word(tmp_path: Path) -> None:
    values = {
        "scalar": np.float32(0.5), "integer": np.int64(3), "flag": np.bool_(True), "array": np.arange(3),
        "tensor": torch.tensor([1.5]), "zero_d": torch.tensor(2), "tuple": (1, 2.0),
        "nan": float("nan"), "inf": np.array([-np.inf]),
    }  # fmt: skip
    append_record(tmp_path, _record(values=values))

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    (record,) = json.loads((tmp_path / "facts.json").read_text(), parse_constant=no_constant)
    assert record["values"] == {
        "scalar": 0.5, "integer": 3, "flag": True, "array": [0, 1, 2], "tensor": [1.5], "zero_d": 2, "tuple": [1, 2.0],
        "nan": "nan", "inf": ["-inf"],
    }  # fmt: skip


def test_numbers_that_are_none_are_read_as_words(tmp_path: Path) -> None:
    """Of a stranger: another record is appended, and nothing that reads them meets a number that is none."""
    append_record(tmp_path, _record())
    path = tmp_path / "facts.json"
    huge = f"-1{'0' * 400}"
    path.write_text(path.read_text().replace("0.5", f'[NaN, 1e999, {huge}], "x": {{"y": -Infinity}}'))
    (record,) = Facts.load(tmp_path).records
    assert record.values == {"top1": ["nan", "inf", "-inf"], "x": {"y": "-inf"}}
    append_record(tmp_path, _record())
    assert Facts.load(tmp_path).records[0] == record
    record.values["x"] = float("inf")
    Facts(records=[record]).save(tmp_path)
    assert Facts.load(tmp_path).records[0].values["x"] == "inf"


def test_a_record_is_known_by_what_it_holds(tmp_path: Path):
    values = {"analyses": {"cka": {"mean": 0.25, "layers": (1, 2)}}, "skipped": 0}
    append_record(tmp_path, make_record("analysis", values=values, command="hf-vit analyze"))
    assert is_recorded(tmp_path, "analysis", {"analyses": {"cka": {"layers": [1, 2]}}})
    assert not is_recorded(tmp_path, "analysis", {"analyses": {"cka": {"mean": 0.5}}})
    assert not is_recorded(tmp_path, "analysis", {"analyses": {"other": {}}})
    assert not is_recorded(tmp_path, "benchmark", {"skipped": 0})


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from training"):
        make_record("guess", values={})
    with pytest.raises(ValueError, match="cannot store <object"):
        make_record("training", values={"x": object()})


def test_hardware_and_versions_are_this_machine() -> None:
    machine, found = read_hardware("cpu"), list_versions()
    assert (machine["device"], bool(machine["name"])) == ("cpu", True)
    assert 1 <= machine["cores"] <= (os.cpu_count() or 1)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert machine["memory_gib"] == pytest.approx(pages, abs=0.1)
    assert torch.__version__.startswith(found["torch"])
    assert found["python"] == platform.python_version()


@pytest.mark.parametrize("device", [None, "cuda"])
def test_every_process_picks_its_own_gpu(device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(device) == torch.device("cuda")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert pick_device(device) == torch.device("cuda:1")


@pytest.mark.gpu
def test_the_gpu_is_named() -> None:
    machine = read_hardware("cuda")
    assert machine["device"] == "cuda"
    assert machine["name"] == torch.cuda.get_device_name(0)
    assert machine["gpus"] == torch.cuda.device_count()


def test_a_file_of_measurements_is_whole_after_every_row(tmp_path: Path) -> None:
    typed = ["/home/ann/benchmarks/jpeg.py", "--hub_token", "abc", "--output", "/home/ann/out.json"]
    measurements = Measurements(tmp_path / "out.json", typed, "cpu", packages=("torch", "no-such-package"), turns=3)
    for number in (1, 2):
        measurements.add({"name": f"row {number}", "seconds": {"median": number / 3}}, quiet=number == 2)
        written = json.loads((tmp_path / "out.json").read_text())
        assert [row["name"] for row in written["rows"]] == [f"row {place}" for place in range(1, number + 1)]
        assert written["quiet"] is (number == 2)
    assert written["rows"][1]["seconds"] == {"median": 0.6667}
    assert written["command"] == "python jpeg.py --hub_token REDACTED --output out.json"
    assert (written["turns"], "torch" in written["versions"]) == (3, True)
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    with pytest.raises(UserError, match=r"the folder .*nowhere for the results"):
        Measurements(tmp_path / "nowhere" / "out.json", "hf-vit bench models", "cpu")
