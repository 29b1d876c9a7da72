"""The loopback Hub itself: what goes in comes out, what is wrong is refused, faults strike when they should."""

import hashlib

import pytest

from loopback import jobs
from loopback.client import Client, Loopback, content_hash
from loopback.refusal import Refusal

LARGE = 300_000


def test_files_come_back_as_they_were(hub: Loopback, client: Client) -> None:
    sizes = {"config.json": 200, "model.safetensors": LARGE, "folder/notes.txt": 10}
    commit = client.run("loopback.jobs:upload", files=sizes)["commit"]
    assert hub.head(jobs.REPO) == commit
    wanted = {name: jobs.content(size) for name, size in sizes.items()}
    assert hub.files(jobs.REPO) == {name: content_hash(data, "safe" in name) for name, data in wanted.items()}
    sha256 = {name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()}
    assert client.run("loopback.jobs:download", files=list(sizes)) == sha256
    storage = [entry["path"] for entry in hub.log() if entry["origin"] == "storage"]
    assert any(path.startswith("/xet/" if client.transport == "xet" else "/lfs/") for path in storage)


def test_what_xet_cannot_compress_and_what_it_can(hub: Loopback, xet_client: Client) -> None:
    """Both LZ4 forms and chunks that are stored as they are: the rebuilt file's SHA-256 is checked on the way in."""
    from loopback.xet_format import decode_lz4_frame

    # An LZ4 frame: no checksums, one block: literals "abcd", then 8 bytes copied from 4 back, then the literal "e".
    block = bytes([0x44]) + b"abcd" + bytes([4, 0]) + bytes([0x10]) + b"e"
    frame = b"\x04\x22\x4d\x18" + bytes([0x60, 0x40, 0]) + len(block).to_bytes(4, "little") + block + bytes(4)
    assert decode_lz4_frame(frame) == b"abcdabcdabcde"
    for damaged in (frame[:-1] + b"\x01", frame[:-4], frame + b"\x00"):
        with pytest.raises(Refusal, match="malformed"):
            decode_lz4_frame(damaged)
    xet_client.run("loopback.jobs:upload", files={"a.bin": 1, "b.bin": 70_000, "c.safetensors": 1_200_000})
    assert len(xet_client.run("loopback.jobs:download", files=["a.bin", "b.bin", "c.safetensors"])) == 3


def test_a_commit_deletes_and_a_stale_parent_is_refused(hub: Loopback, xet_client: Client) -> None:
    first = xet_client.run("loopback.jobs:upload", files={"old.bin": 5, "kept.txt": 5})["commit"]
    second = xet_client.run("loopback.jobs:upload", files={"new.bin": 5}, delete=["old.bin"])["commit"]
    assert sorted(hub.files(jobs.REPO)) == ["kept.txt", "new.bin"]
    assert sorted(hub.files(jobs.REPO, first)) == ["kept.txt", "old.bin"]
    stale = xet_client.attempt("loopback.jobs:upload", files={"late.bin": 5}, parent_commit=first)
    assert stale.code == 1
    assert "412" in stale.err
    assert hub.head(jobs.REPO) == second


def test_a_pull_request_leaves_the_branch_alone(hub: Loopback, xet_client: Client) -> None:
    first = xet_client.run("loopback.jobs:upload", files={"a.txt": 5})["commit"]
    proposed = xet_client.run("loopback.jobs:upload", files={"b.txt": 5}, create_pr=True)
    assert proposed["pull_request"] == "refs/pr/1"
    assert hub.head(jobs.REPO) == first
    assert sorted(hub.files(jobs.REPO, "refs%2Fpr%2F1")) == ["a.txt", "b.txt"]


@pytest.mark.parametrize("token", ["hf_alice_read", "hf_bob_write", "hf_nobody", None])
def test_who_may_not_write_does_not(hub: Loopback, xet_client: Client, token: str | None) -> None:
    first = xet_client.run("loopback.jobs:upload", files={"a.txt": 5})["commit"]
    assert xet_client.attempt("loopback.jobs:upload", files={"b.bin": 5}, token=token).code == 1
    assert hub.head(jobs.REPO) == first


def test_private_and_gated_repositories(hub: Loopback, xet_client: Client) -> None:
    xet_client.run("loopback.jobs:upload", files={"a.txt": 5})
    ask = {"files": ["a.txt"]}
    for changes, code in (({"private": True}, "404"), ({"private": False, "gated": "auto"}, "403")):
        hub.settings(jobs.REPO, **changes)
        refused = xet_client.attempt("loopback.jobs:download", token="hf_bob_write", **ask)
        assert refused.code == 1
        assert code in refused.err
        assert xet_client.attempt("loopback.jobs:download", token="hf_alice_read", **ask).code == 0
        xet_client.clear()
    hub.settings(jobs.REPO, granted=["bob"])
    assert xet_client.attempt("loopback.jobs:download", token="hf_bob_write", **ask).code == 0


def test_damaged_uploads_are_refused(hub: Loopback, client: Client) -> None:
    """One flipped bit on the way: the bytes do not hash to what was claimed, and no commit can name them."""
    hub.fault(r"^/lfs/|/xorbs/", "corrupt_request", times=-1)
    assert client.attempt("loopback.jobs:upload", files={"model.safetensors": LARGE}).code == 1
    assert hub.fired() > 0
    assert hub.files(jobs.REPO) == {}


def test_faults_count_requests(hub: Loopback, xet_client: Client) -> None:
    hub.fault("/preupload/", "status", status=503, nth=2, times=2)
    xet_client.run("loopback.jobs:upload", files={"a.txt": 5})
    assert hub.fired() == 0
    xet_client.run("loopback.jobs:upload", files={"b.txt": 5})
    assert hub.fired() == 2
    assert [entry["status"] for entry in hub.log() if "/preupload/" in entry["path"]] == [200, 503, 503, 200]


def test_the_check_finds_damage(hub: Loopback, xet_client: Client, tmp_path) -> None:
    xet_client.run("loopback.jobs:upload", files={"a.txt": 500})
    assert hub.fsck() == []
    stored = [path for path in hub.store.glob("blobs/*/*") if path.stat().st_size == 500]
    data = stored[0].read_bytes()
    stored[0].write_bytes(b"x" + data[1:])
    assert "a.txt" in " ".join(hub.fsck())
    stored[0].write_bytes(data)


def test_a_token_at_the_storage_is_seen(hub: Loopback) -> None:
    """The check every test ends with can fail."""
    import urllib.error
    import urllib.request

    request = urllib.request.Request(hub.storage + "/get/" + "0" * 64, headers={"Authorization": "Bearer hf_bob_write"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    assert [entry["hub_token"] for entry in hub.log()] == [True]
    hub.reset()


def test_clients_start_from_nothing(client: Client, stranger: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = client.run("loopback.jobs:look_around", token=None)
    assert seen["home"] == []
    assert seen["token"] is None
    assert seen["xet"] == (client.transport == "xet")
    assert [name for name in seen["environment"] if "TOKEN" in name or "OFFLINE" in name] == []
    assert client.run("loopback.jobs:without_package") == "it is there"
    assert stranger.run("loopback.jobs:without_package") == "No module named 'hf_vit'"


def test_a_killed_job_is_told(client: Client, hub: Loopback) -> None:
    hub.fault("/preupload/", "held")
    job = client.start("loopback.jobs:upload", files={"a.txt": 5})
    hub.wait_for_fault(job)
    job.kill()
    assert job.wait().code == -9
    hub.clear_faults()
