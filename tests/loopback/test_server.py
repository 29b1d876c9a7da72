"""The loopback Hub itself: what goes in comes out, faults strike when they should, what is wrong is seen."""

import random
import urllib.error
import urllib.request

import pytest

from loopback.client import Client, Loopback, content_hash

REPO, UPLOAD, READ = "alice/plain", "hub.jobs:upload_raw", "hub.jobs:read"
TEXT = "".join(random.Random(0).choices("abcd", k=1_200_000))  # of several chunks, which Xet compresses


def test_files_come_back_as_they_were(hub: Loopback, client: Client) -> None:
    """Of every size, over both transports."""
    files = {"a.bin": "a", "b.bin": TEXT[:70_000], "model.safetensors": TEXT, "folder/notes.txt": "words"}
    assert client.run(UPLOAD, repo_id=REPO, files=files) == hub.head(REPO)
    assert hub.files(REPO) == {
        name: content_hash(text.encode(), name.endswith((".bin", ".safetensors"))) for name, text in files.items()
    }
    for name, text in files.items():
        assert client.run(READ, repo_id=REPO, name=name) == text, name
    storage = [entry["path"] for entry in hub.log() if entry["origin"] == "storage"]
    assert any(path.startswith("/xet/" if client.transport == "xet" else "/lfs/") for path in storage)


def test_faults_strike_when_they_should(hub: Loopback, client: Client) -> None:
    """A request is counted; one flipped bit on the way is refused, and no commit can name such bytes."""
    hub.fault("/preupload/", "status", status=503, nth=2, times=2)
    for name in ("a.txt", "b.txt"):
        client.run(UPLOAD, repo_id=REPO, files={name: "words"})
    assert [entry["status"] for entry in hub.log() if "/preupload/" in entry["path"]] == [200, 503, 503, 200]
    hub.fault(r"^/lfs/|/xorbs/", "corrupt_request", times=-1)
    assert client.attempt(UPLOAD, repo_id=REPO, files={"model.safetensors": TEXT[:300_000]}).code == 1
    assert set(hub.files(REPO)) == {"a.txt", "b.txt"}


def test_the_checks_after_every_test_can_fail(hub: Loopback, xet_client: Client) -> None:
    """Damage on disk, and a token at the storage."""
    xet_client.run(UPLOAD, repo_id=REPO, files={"a.txt": TEXT[:500]})
    (stored,) = (path for path in hub.store.glob("blobs/*/*") if path.stat().st_size == 500)
    stored.write_bytes(b"x" + stored.read_bytes()[1:])
    assert "a.txt" in " ".join(hub.fsck())
    hub.reset()
    request = urllib.request.Request(hub.storage + "/get/" + "0" * 64, headers={"Authorization": "Bearer hf_bob_write"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    assert [entry["hub_token"] for entry in hub.log()] == [True]
    hub.reset()
