"""The loopback Hub itself: what is wrong is seen."""

import urllib.error
import urllib.request

import pytest

from loopback.client import Client, Loopback


def test_the_checks_after_every_test_can_fail(hub: Loopback, xet_client: Client) -> None:
    """Damage on disk, and a token at the storage."""
    xet_client.run("hub.jobs:upload_raw", repo_id="alice/plain", files={"a.txt": "x" * 500})
    (stored,) = (path for path in hub.store.glob("blobs/*/*") if path.stat().st_size == 500)
    stored.write_bytes(b"y" + stored.read_bytes()[1:])
    assert "a.txt" in " ".join(hub.fsck())
    hub.reset()
    request = urllib.request.Request(hub.storage + "/get/" + "0" * 64, headers={"Authorization": "Bearer hf_bob_write"})
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request)
    assert [entry["hub_token"] for entry in hub.log()] == [True]
    hub.reset()
