"""What a user reads when sharing fails: cause, state and remedy in one line, and nothing made before."""

import errno
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors
from loopback.client import Client, Loopback

from hf_vit.repositories.failures import explain
from hf_vit.repositories.retrying import reason, wait_asked

REPO = "alice/my-vit"


def refused(
    hub: Loopback, client: Client, folder: Path, token: str | None = "hf_alice_write", **options: object
) -> str:
    """The message of a push that must not have made anything."""
    wanted = options.get("repo_id", REPO)
    before = hub.get(f"/api/models/{wanted}")
    answer = client.run("hub.jobs:push", folder=str(folder), token=token, **options)
    assert "error" in answer, answer
    assert "\n" not in answer["error"]
    assert hub.get(f"/api/models/{wanted}") == before
    return answer["error"]


@pytest.fixture
def folder(saved_models: dict[str, Path]) -> Path:
    return saved_models["plain"]


def test_no_token(hub: Loopback, xet_client: Client, folder: Path) -> None:
    message = refused(hub, xet_client, folder, token=None)
    assert "there is no token" in message
    assert "HF_TOKEN" in message
    assert str(xet_client.home / "token") in message
    assert "hf auth login" in message
    assert {entry["path"] for entry in hub.log()} == {f"/api/models/{REPO}"}, "only this test asked anything"


def test_bad_token(hub: Loopback, xet_client: Client, folder: Path) -> None:
    message = refused(hub, xet_client, folder, token="hf_wrong")
    assert "the token of the environment variable HF_TOKEN is invalid" in message
    assert "overrides" not in message
    xet_client.run("hub.jobs:stored_token", text="hf_alice_write")
    message = refused(hub, xet_client, folder, token="hf_wrong")
    assert f"overrides the one that `hf auth login` stored in {xet_client.home / 'token'}" in message
    xet_client.run("hub.jobs:stored_token", text="hf_stale")
    message = refused(hub, xet_client, folder, token=None)
    assert f"the token in {xet_client.home / 'token'} is invalid" in message


def test_the_stored_token_is_used(hub: Loopback, xet_client: Client, folder: Path) -> None:
    xet_client.run("hub.jobs:stored_token", text="hf_alice_write")
    assert "commit" in xet_client.run("hub.jobs:push", folder=str(folder), token=None)
    assert "commit" in xet_client.run("hub.jobs:push", folder=str(folder), token=None, repo_id="acme/x")


def test_no_right_to_write(hub: Loopback, xet_client: Client, folder: Path, make_model: Callable[..., Path]) -> None:
    message = refused(hub, xet_client, folder, token="hf_alice_read")
    assert "can only read, and alice/my-vit has to be created" in message
    message = refused(hub, xet_client, folder, token="hf_bob_write")
    assert "has no right to create it: give bob/my-vit" in message
    message = refused(hub, xet_client, folder, token="hf_bob_write", repo_id="acme/vit")
    assert "become a writing member of acme" in message
    xet_client.run("hub.jobs:push", folder=str(folder))
    other = make_model("other", seed=5)
    for token in ("hf_alice_read", "hf_bob_write"):
        message = refused(hub, xet_client, other, token=token)
        assert "gives no right to write to alice/my-vit" in message
        assert "--create-pr" in message
    proposed = xet_client.run("hub.jobs:push", folder=str(other), token="hf_bob_write", create_pr=True)
    assert proposed["pull_request"]


def test_the_hub_refuses_the_card(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    """What passes our own checks and not the Hub's."""
    (model_folder / "README.md").write_text("---\nlicense: nobody-knows-1.0\n---\nmine")
    message = refused(hub, xet_client, model_folder)
    assert message.startswith('the Hub would refuse the card\'s metadata: "license" must be one of [')


def test_too_large(hub: Loopback, client: Client, folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    message = refused(hub, client, folder, limits={"hub.contents.LARGEST_FILE": size - 1})
    assert f"model.safetensors has {size:,} bytes; the Hub takes at most {size - 1:,}" in message
    assert hub.get(f"/api/models/{REPO}") is None
    hub.limit(largest_lfs=size - 1)
    answer = client.run("hub.jobs:push", folder=str(folder))
    assert f"model.safetensors ({size:,} bytes) is larger than the Hub takes" in answer["error"]
    assert hub.files(REPO) == {}
    hub.limit(largest_lfs=size)
    assert client.run("hub.jobs:push", folder=str(folder))["commit"] == hub.head(REPO)


def test_a_storage_that_fails_prints_no_signed_address(hub: Loopback, client: Client, folder: Path) -> None:
    """The client's own log names it at every attempt."""
    hub.fault(r"^/lfs/|^/xet/v1/(xorbs|shards)", "status", status=503, times=-1)
    done = client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO])
    assert done.code == 1
    (line,) = done.err.strip().splitlines()
    assert "the Hub fails at the moment" in line
    assert "sig=" not in done.out + done.err


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/commit/", {"status": 403, "message": "Private repository storage limit reached"}, "no room left for alice/"),
        ("/commit/", {"status": 413}, "are more than the Hub takes in one commit"),
        ("/validate-yaml", {"status": 500}, "the Hub fails at the moment"),
    ],
)
def test_the_remedy_fits_the_failure(
    path: str, fields: dict[str, Any], message: str, hub: Loopback, xet_client: Client, folder: Path
) -> None:
    hub.fault(path, "status", times=-1, **fields)
    told = xet_client.run("hub.jobs:push", folder=str(folder), limits={"repositories.retrying.ATTEMPTS": 2})["error"]
    assert message in told
    assert "role write" not in told
    assert "max_shard_size" not in told


def test_the_check_of_the_card_is_cut_off(hub: Loopback, xet_client: Client, folder: Path) -> None:
    hub.fault("/validate-yaml", "cut_response", after=10, times=-1)
    assert "cannot be reached" in refused(hub, xet_client, folder, limits={"repositories.retrying.ATTEMPTS": 2})


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for error in (OSError(errno.ENOSPC, "No space left"), RuntimeError("IO Error: No space left (os error 28)")):
        told = str(explain(error, REPO))
        assert told.startswith("the disk is full (")
        assert "HF_HOME" in told


def answer(status: int, **headers: str) -> Exception:
    http = sys.modules[errors.Response.__module__.partition(".")[0]]  # which library, depends on the version
    response = errors.Response(status, headers=headers, request=http.Request("GET", "https://hub/x"))
    return errors.HfHubHTTPError("no", response=response)


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (503, {"Retry-After": "7"}, 7),
        (503, {"Retry-After": "TOMORROW"}, 86400),
        (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        (429, {"RateLimit": '"api";r=0;t=3'}, 3),
        (429, {"Retry-After": "9", "RateLimit": '"api";r=0;t=3'}, 9),
        (503, {"RateLimit": '"api";r=400;t=55'}, None),
        (503, {"Retry-After": "soon"}, None),
    ],
)
def test_how_long_a_server_asks_to_wait(status: int, headers: dict[str, str], seconds: float | None) -> None:
    tomorrow = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    asked = wait_asked(answer(status, **{name: text.replace("TOMORROW", tomorrow) for name, text in headers.items()}))
    assert asked == (None if seconds is None else pytest.approx(seconds, abs=1))


def test_when_to_try_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert "try again in 3 s" in str(explain(answer(429, RateLimit='"api";r=0;t=3'), REPO))
    assert "try again later" in str(explain(answer(429), REPO))


@pytest.mark.parametrize(
    ("path", "words"),
    [(r"^/lfs/", "Bad part 1"), ("objects/batch", "LFS is off for alice"), ("/commit/", "No, thanks")],
)
def test_the_server_s_own_words_are_kept(path: str, words: str, hub: Loopback, client: Client, folder: Path) -> None:
    """Of Xet's storage hf_xet tells the status alone."""
    if client.transport == "xet" and path != "/commit/":
        path, words = r"^/xet/v1/(xorbs|shards)", "400 Bad Request"
    hub.fault(path, "status", status=400, times=-1, message=words)
    told = client.run("hub.jobs:push", folder=str(folder))["error"]
    assert words in told
    assert told.startswith("the upload failed: ")
    assert told.count("the upload") == 1


def test_a_wait_that_is_too_long_is_told_once(hub: Loopback, xet_client: Client, folder: Path) -> None:
    hub.fault("/commit/", "status", status=429, headers={"RateLimit": '"api";r=0;t=200'})
    told = xet_client.run("hub.jobs:push", folder=str(folder))["error"]
    assert told.startswith("the upload: the Hub asks to wait 200 s (HTTP 429: injected fault); run the same command")
    assert "main is unchanged" in told


def test_no_reason_names_a_signed_address() -> None:
    error = RuntimeError("error sending request for url (https://cdn/lfs/ab?X-Amz-Signature=12&x=1)")
    assert reason(error) == "error sending request for url (https://cdn/lfs/ab)"


def test_no_account_s_name_colours_or_turns_the_terminal(hub: Loopback, xet_client: Client, folder: Path) -> None:
    member = {"orgs": [{"name": "alice", "roleInOrg": "write"}], "auth": {}}
    body = {"type": "user", "name": "\x1b[31mal\u202eice\x07", **member}
    hub.fault("/whoami", "status", status=200, times=-1, body=body)
    told = xet_client.run("hub.jobs:push", folder=str(folder), dry_run=True)["told"]
    assert "as [31malice (" in " ".join(told)
    assert all(line.isprintable() for line in told)


def test_no_reason_colours_or_turns_the_terminal() -> None:
    assert reason(RuntimeError("\x1b[31mred\x07 \u202egnp\nlast")) == "[31mred gnp last"


def test_offline_and_unreachable(hub: Loopback, xet_client: Client, folder: Path) -> None:
    assert "offline mode is on" in xet_client.run("hub.jobs:offline", folder=str(folder))
    message = xet_client.run("hub.jobs:unreachable", folder=str(folder))
    assert "cannot be reached" in message
    assert "check the network" in message


def test_what_cannot_be_loaded_is_told(hub: Loopback, xet_client: Client, folder: Path) -> None:
    """Missing, private, gated, another revision: by `verify`, with and without a token."""

    def told(token: str | None, **options: object) -> str:
        return xet_client.run("hub.jobs:verify", token=token, **options)["error"]

    assert "alice/my-vit was not found, or this token" in told("hf_alice_write")
    assert "alice/my-vit was not found, or this token" in told(None)
    xet_client.run("hub.jobs:push", folder=str(folder))
    assert "has no such revision" in told("hf_alice_write", revision="v9")
    hub.settings(REPO, private=True)
    assert "was not found, or this token" in told("hf_bob_write")
    assert "hf auth login" in told(None)
    hub.settings(REPO, private=False, gated="manual")
    for token in ("hf_bob_write", None):
        assert f"is gated: ask for access on {hub.endpoint}/{REPO}" in told(token)
    assert f"{REPO}, then log in: a token is looked for in" in told(None)
    assert told("hf_bob_write").endswith("as the owner of the token of the environment variable HF_TOKEN")
    hub.settings(REPO, granted=["bob"])
    assert xet_client.run("hub.jobs:verify", token="hf_bob_write")["commit"] == hub.head(REPO)


def test_the_program_ends_with_one_line(hub: Loopback, xet_client: Client, folder: Path) -> None:
    done = xet_client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO], token="hf_wrong")
    assert done.code == 1
    assert done.out == ""
    (line,) = done.err.strip().splitlines()
    assert line.startswith("hf-vit: the token of the environment variable HF_TOKEN is invalid")
