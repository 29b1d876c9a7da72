"""Disks that are full, read-only, broken or over quota: one line, nothing half-written, and the next run completes.

What the system says is put in its mouth at a chosen change of files. Where this machine lets a tmpfs be mounted, a disk
that is really full takes part: it is made so small, at a chosen change, that nothing more fits. The record says whether
it did.
"""

import subprocess
from collections.abc import Callable, Iterator

import pytest
from campaigns import strikes
from campaigns.commands import WRITING
from campaigns.ledger import Campaign, failures
from campaigns.places import Prepared
from campaigns.watched import Watcher

ERRORS = ("EDQUOT", "EIO", "EMFILE", "EROFS", "EACCES")


@pytest.fixture(scope="module")
def has_disk(watcher: Watcher) -> Iterator[bool]:
    """Whether the place could be made a disk of its own."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={strikes.PLENTY}", "tmpfs", str(watcher.place)]
    is_mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield is_mounted
    if is_mounted:
        subprocess.run(["umount", str(watcher.place)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_refused_at_every_stage(watcher: Watcher, has_disk: bool, prepared: Callable[[str], Prepared]) -> None:
    def cases() -> Iterator[str]:
        for place, name in enumerate(WRITING):
            command = prepared(name)
            few = 6 // strikes.THINNED + 1
            numbers = {"ENOSPC": strikes.every_change(command, name, "ENOSPC")}
            if has_disk:
                numbers["FULL"] = strikes.some_changes(command, name, "FULL", few)
            for what in ERRORS if strikes.THINNED == 1 else ERRORS[place % len(ERRORS) :][:1]:
                numbers[what] = strikes.some_changes(command, name, what, 1)
            yield from (f"{name}, {what} at a change/{at}" for what, moments in numbers.items() for at in moments)

    def attempt(case: str) -> str:
        group, _, at = case.partition("/")
        name, _, how = group.partition(", ")
        return strikes.refuse(watcher, prepared(name), how.split()[0], int(at))

    command = "pytest -m slow tests/campaigns/test_full_disks.py"
    counts = Campaign("full_disks", command, seed=0, thinned=strikes.THINNED, tmpfs=has_disk).run(cases(), attempt)
    assert not failures(counts)
