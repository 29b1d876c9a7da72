"""The loopback Hub itself: what goes in comes out, what is wrong is refused, faults strike when they should."""

import hashlib
import urllib.error
import urllib.request

import pytest

from loopback import jobs
from loopback.client import Client, Loopback, content_hash

UPLOAD, DOWNLOAD = "loopback.jobs:upload", "loopback.jobs:download"


def test_files_come_back_as_they_were(hub: Loopback, client: Client, stranger: Client) -> None:
    """Of every size, over both transports, by a client that knows nothing of this process."""
    sees_xet = client.transport == "xet"
    assert client.run("loopback.jobs:look_around", token=None) == [[], None, sees_xet, "hf_vit"]
    sizes = {"config.json": 200, "a.bin": 1, "b.bin": 70_000, "model.safetensors": 1_200_000, "folder/notes.txt": 10}
    assert client.run(UPLOAD, files=sizes)["commit"] == hub.head(jobs.REPO)
    wanted = {name: jobs.content(size) for name, size in sizes.items()}
    hashes = {name: content_hash(data, name.endswith((".bin", ".safetensors"))) for name, data in wanted.items()}
    assert hub.files(jobs.REPO) == hashes
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
    assert client.run(DOWNLOAD, files=list(sizes)) == sha256
    storage = [entry["path"] for entry in hub.log() if entry["origin"] == "storage"]
    assert any(path.startswith("/xet/" if sees_xet else "/lfs/") for path in storage)
    assert stranger.run("loopback.jobs:look_around", token=None)[-1] == "No module named 'hf_vit'"


def test_commits_and_rights(hub: Loopback, xet_client: Client) -> None:
    """A commit deletes, a stale parent is refused, a pull request leaves the branch alone, few may write."""
    first = xet_client.run(UPLOAD, files={"old.bin": 5, "kept.txt": 5})["commit"]
    second = xet_client.run(UPLOAD, files={"new.bin": 5}, delete=["old.bin"])["commit"]
    assert sorted(hub.files(jobs.REPO)) == ["kept.txt", "new.bin"]
    assert sorted(hub.files(jobs.REPO, first)) == ["kept.txt", "old.bin"]
    stale = xet_client.attempt(UPLOAD, files={"late.bin": 5}, parent_commit=first)
    assert stale.code == 1
    assert "412" in stale.err
    assert xet_client.run(UPLOAD, files={"b.txt": 5}, create_pr=True)["pull_request"] == "refs/pr/1"
    assert sorted(hub.files(jobs.REPO, "refs%2Fpr%2F1")) == ["b.txt", "kept.txt", "new.bin"]
    for token in ("hf_alice_read", "hf_bob_write", "hf_nobody", None):
        assert xet_client.attempt(UPLOAD, files={"c.bin": 5}, token=token).code == 1
    assert hub.head(jobs.REPO) == second
    ask = {"files": ["kept.txt"]}
    for changes, code in (({"private": True}, "404"), ({"private": False, "gated": "auto"}, "403")):
        hub.settings(jobs.REPO, **changes)
        refused = xet_client.attempt(DOWNLOAD, token="hf_bob_write", **ask)
        assert refused.code == 1
        assert code in refused.err
    hub.settings(jobs.REPO, granted=["bob"])
    assert xet_client.attempt(DOWNLOAD, token="hf_bob_write", **ask).code == 0


def test_faults_strike_when_they_should(hub: Loopback, client: Client) -> None:
    """A request is counted; one flipped bit on the way is refused, and no commit can name such bytes."""
    hub.fault("/preupload/", "status", status=503, nth=2, times=2)
    client.run(UPLOAD, files={"a.txt": 5})
    client.run(UPLOAD, files={"b.txt": 5})
    assert [entry["status"] for entry in hub.log() if "/preupload/" in entry["path"]] == [200, 503, 503, 200]
    hub.fault(r"^/lfs/|/xorbs/", "corrupt_request", times=-1)
    assert client.attempt(UPLOAD, files={"model.safetensors": 300_000}).code == 1
    assert set(hub.files(jobs.REPO)) == {"a.txt", "b.txt"}


def test_the_checks_after_every_test_can_fail(hub: Loopback, xet_client: Client) -> None:
    """Damage on disk, and a token at the storage."""
    xet_client.run(UPLOAD, files={"a.txt": 500})
    (stored,) = (path for path in hub.store.glob("blobs/*/*") if path.stat().st_size == 500)
    stored.write_bytes(b"x" + stored.read_bytes()[1:])
    assert "a.txt" in " ".join(hub.fsck())
    hub.reset()
    request = urllib.request.Request(hub.storage + "/get/" + "0" * 64, headers={"Authorization": "Bearer hf_bob_write"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    assert [entry["hub_token"] for entry in hub.log()] == [True]
    hub.reset()
