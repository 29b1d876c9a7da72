"""`hf-vit embed --runner ray` while its processes, machines and images fail: one row an image, or one line.

A cluster is Ray's own of several nodes on one machine. What is killed is replaced; what ends the command is made good
by the same command; and the files have the rows of one process in its order, with embeddings equal within 1e-6.
"""

import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from pyarrow import parquet

from campaigns.commands import save_classifier
from campaigns.engine import Campaign
from campaigns.launches import Launch
from hf_vit.evaluation import embed

BOUND = 600  # seconds for a command on a busy machine
IMAGES, ROWS_PER_FILE, BATCH = 160, 4, 2
MOMENTS = 40  # that a run's files are divided into
SPLIT = ("--split", "train")
# What is killed -> the beginning of its command line; a lost server ends the command.
SERVERS = {"raylet": "raylet/raylet", "store of the cluster": "gcs/gcs_server"}
TITLES = {"actor": "ray::MapWorker", "reader": "MapBatches(_read)", **SERVERS}
# What fails -> how often.
KINDS = {
    "actor": 20, "reader": 20, "driver": 15, "Ctrl-C": 5, "raylet": 10, "store of the cluster": 5, "slow actor": 3,
    "corrupt image": 5, "node": 15, "two nodes": 2,
}  # fmt: skip


def make_place(folder: Path) -> Path:
    """A classifier of 8 px, images of 200 px, and what one process makes of them."""
    save_classifier(folder / "model", "ab")
    noise = np.random.RandomState(0)
    for index in range(IMAGES):
        kind = folder / "images" / "train" / "ab"[index % 2]
        kind.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.randint(0, 256, (200, 200, 3), dtype=np.uint8)).save(kind / f"{index:03d}.png")
    given: dict[str, Any] = dict(rows_per_file=ROWS_PER_FILE, batch_size=BATCH, splits=["train"])
    embed(str(folder / "model"), str(folder / "images"), folder / "whole", device="cpu", **given)
    return folder


class Run(Launch):
    def __init__(self, place: Path, name: str, *options: str, data: str = "images") -> None:
        super().__init__(BOUND)
        name = re.sub(r"[/ ]", "-", name)
        self.place, self.output = place, place / name
        words = ["embed", "model", "--data", data, "--output", name, *SPLIT, "--runner", "ray", "--device", "cpu"]
        words += ["--no-optimize", "--rows-per-file", str(ROWS_PER_FILE), "--batch-size", str(BATCH), *options]
        # What was started in the background ignores a Ctrl-C, and so does what it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.start(place / f"{name}.txt", sys.executable, "-m", "hf_vit", *words, cwd=place)

    def wait_for(self, moment: int) -> bool:
        """Whether so many `MOMENTS` of the files appeared before it ended; at least one."""
        files = max(1, moment * len(list((self.place / "whole").glob("*.parquet"))) // MOMENTS)
        return self.wait_until(lambda: len(list(self.output.glob("*.parquet"))) >= files)

    def named(self, beginning: str) -> list[psutil.Process]:
        """Return what it started whose command line begins so."""
        found = []
        for process in self.children():
            with suppress(psutil.Error):
                found += [process] if beginning in "".join(process.cmdline()[:1]) else []
        return found

    def end_alone(self) -> int:
        """Its exit status, within the bound; nothing that it started lives on."""
        (code,) = self.end()
        _, alive = psutil.wait_procs(self.started, timeout=BOUND / 3)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive[:3]}"
        return code

    def check_files(self) -> None:
        whole = {path.name: parquet.read_table(path) for path in (self.place / "whole").glob("*.parquet")}
        mine = {path.name: parquet.read_table(path) for path in self.output.glob("*.parquet")}
        assert mine.keys() == whole.keys(), f"{len(mine)} of {len(whole)} files: {self.text[-300:]}"
        for name, table in whole.items():
            assert mine[name].schema.equals(table.schema, check_metadata=True), f"{name} has another schema"
            assert mine[name].drop("embedding").equals(table.drop("embedding")), f"{name} has other rows"
            # An actor may have another number of threads than one process, which changes the last digits.
            vectors = [np.array(one["embedding"].to_pylist()) for one in (mine[name], table)]
            np.testing.assert_allclose(*vectors, rtol=1e-6, atol=1e-6, err_msg=name)
        assert (self.output / "manifest.json").is_file()

    def check_done(self) -> str:
        assert self.end_alone() == 0, self.text[-400:]
        self.check_files()
        return "same files"

    def check_going_on(self) -> str:
        """It ended, in whatever way; the same command does the rest."""
        code = self.end_alone()
        assert Run(self.place, self.output.name).check_done() == "same files"
        return f"ended ({'in itself' if code >= 0 else 'killed'}), the same command: same files"


def strike(place: Path, case: str) -> str:
    """KIND/number at MOMENT: what is struck when so much of the files is there."""
    kind, _, moment = case.replace(" at ", "/").split("/")
    run = Run(place, case)
    if not run.wait_for(int(moment)):
        return f"ended before, {run.check_done()}"
    if kind == "driver":
        run.processes[0].kill()
        return run.check_going_on()
    if kind == "Ctrl-C":
        run.processes[0].send_signal(signal.SIGINT)
        assert run.end_alone() == 130, run.text[-400:]
        assert "run the same command again to continue" in run.text
        assert Run(place, run.output.name).check_done() == "same files"
        return "one line, the same command: same files"
    if kind == "slow actor":
        run.slow_down(lambda: run.named(TITLES["actor"]))
        return run.check_done()
    for process in run.named(TITLES[kind]):
        process.kill()
    return run.check_going_on() if kind in SERVERS else run.check_done()


def corrupt(place: Path, case: str) -> str:
    """An image is damaged after all were looked at: the part that holds it is told in one line, others stay."""
    torn = place / "torn"
    if not torn.exists():
        shutil.copytree(place / "images", torn)
    last = max((place / "whole").glob("*.parquet"))
    victim = torn / "train" / parquet.read_table(last).column("image")[0].as_py()
    whole = victim.read_bytes()
    run = Run(place, case, data="torn")
    try:
        assert run.wait_for(1)
        victim.write_bytes(whole[:2000])
        assert run.end_alone() != 0, "it says nothing"
        lines = [line for line in run.text.splitlines() if line.startswith("hf-vit: ")]  # Ray's libraries say more
        assert len(lines) == 1, run.text[-400:]
        assert re.search(rf"image '.*{victim.name}'.*(corrupt|cannot be read)", lines[0]), lines[0]
        return "one line"
    finally:
        victim.write_bytes(whole)


def of_a_cluster(place: Path, case: str) -> str:
    """Two nodes, of which one may be killed."""
    from ray.cluster_utils import Cluster

    kind, _, moment = case.replace(" at ", "/").split("/")
    least = 80 << 20
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": least})
    try:
        options = ("--address", cluster.address, "--num-processes", "2")
        node = cluster.add_node(num_cpus=1, object_store_memory=least)
        cluster.wait_for_nodes()
        run = Run(place, case, *options)
        if kind == "node" and run.wait_for(int(moment)):
            cluster.remove_node(node, allow_graceful=False)
        return run.check_done()
    finally:
        cluster.shutdown()


def cases() -> list[str]:
    draw = random.Random(0)
    return [f"{kind}/{number} at {draw.randrange(1, MOMENTS - 2)}" for kind in KINDS for number in range(KINDS[kind])]


@contextmanager
def prepare(folder: Path) -> Iterator[Callable[[str], str]]:
    place = make_place(folder)
    special = {"corrupt image": corrupt, "node": of_a_cluster, "two nodes": of_a_cluster}
    yield lambda case: special.get(case.split("/")[0], strike)(place, case)


PROMISE = (
    "whatever fails of Ray, the files have the rows of one process, or there is one line and the same command does the "
    "rest"
)
QUICK = ("driver/", "Ctrl-C/", "corrupt image/")
CAMPAIGN = Campaign("ray_faults", PROMISE, cases, prepare, {"kinds": KINDS}, lambda case: case.startswith(QUICK))
