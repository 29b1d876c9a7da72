"""Commands that talk to a Hub, killed at changes of files: the next run completes, here and there.

What is killed in the middle of a request is in tests/hub/test_faults.py.
"""

from collections.abc import Iterator

import pytest
from campaigns import strikes
from campaigns.commands import SHARING
from campaigns.conftest import Preparing
from campaigns.ledger import Campaign, failures
from campaigns.watched import Watcher
from loopback.client import Loopback

REPO = "alice/my-vit"


@pytest.fixture(scope="module")
def client(loopback_server: Loopback, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    """Runs commands whose Hub is the loopback one."""
    online = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": loopback_server.endpoint, "HF_TOKEN": "hf_alice_write"}
    watching = Watcher(tmp_path_factory.mktemp("client"), **online, HF_HUB_DISABLE_XET="1", NO_PROXY="127.0.0.1")
    yield watching
    watching.close()


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_sharing_is_killed_at_changes(client: Watcher, loopback_server: Loopback, preparing: Preparing) -> None:
    prepared, shared = preparing(client), dict[str, dict[str, str]]()

    def cases() -> Iterator[str]:
        for name in SHARING:
            loopback_server.reset()
            command = prepared(name)
            shared[name] = lasting(loopback_server)
            for what in ("SIGKILL", "SIGTERM"):
                yield from (f"{name}, {what} at a change/{at}" for at in strikes.every_change(command, name, what))

    def attempt(case: str) -> str:
        group, _, at = case.partition("/")
        name, _, how = group.partition(", ")
        if not name.startswith("verify"):
            loopback_server.reset()
        outcome = strikes.kill(client, prepared(name), how.split()[0], int(at))
        assert lasting(loopback_server) == shared[name], "the Hub does not hold what an unbroken run shares"
        assert loopback_server.fsck() == []
        return outcome

    command = "pytest -m slow tests/campaigns/test_kills_of_sharing.py"
    counts = Campaign("kills_of_sharing", command, thinned=strikes.THINNED).run(cases(), attempt)
    assert not failures(counts)


def lasting(hub: Loopback) -> dict[str, str]:
    """Path -> hash of what the Hub holds; of files that tell of times or names, "" alone."""
    passing = ("facts.json", "README.md", ".png")
    files = hub.files(REPO) | hub.files(f"spaces/{REPO}")
    return {path: "" if path.endswith(passing) else digest for path, digest in files.items()}
