"""Faults of server, storage, network, rights and people: told in one line, and the same command succeeds afterwards."""

import errno
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from hub import jobs
from huggingface_hub import errors
from loopback.client import Client, Loopback

from hf_vit.repositories.hub import explain_hub_error, find_retry_after, summarize_error

REPO = "alice/my-vit"
WEIGHTS = "model.safetensors"
STORAGE, STORED = r"^/lfs/|^/xet/v1/(xorbs|shards)", r"^/get/|^/xorb/"
CREATE, COMMIT = "/api/repos/create", "/commit/"
HURRIED = {"repositories.hub.ATTEMPTS": 3}
IMPATIENT = {"repositories.hub.STALL": 0.8, "repositories.hub.ATTEMPTS": 3}


def cases(faults: dict[str, tuple[Any, ...]], rare: set[str]) -> list[Any]:
    """(transport, fault), the rare ones as slow tests; over LFS what strikes the storage."""
    over_lfs = [name for name, fault in faults.items() if fault[0] == STORAGE]
    pairs = [*(("xet", name) for name in faults), *(("lfs", name) for name in over_lfs)]
    return [pytest.param(*pair, marks=[pytest.mark.slow] if pair[1] in rare else []) for pair in pairs]


@pytest.fixture
def folder(saved_models: dict[str, Path]) -> Path:
    return saved_models["plain"]


def push_and_load(client: Client, folder: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    return tuple(client.run("hub.jobs:push_and_load", folder=str(folder), **options))


def assert_it_works_now(hub: Loopback, client: Client, folder: Path) -> dict[str, Any]:
    done, found = push_and_load(client, folder)
    assert done["commit"] == hub.head(REPO)
    assert found == jobs.logits(str(folder))
    return done


# name -> path, action, fields; they strike once
PASSING: dict[str, tuple[str, str, dict[str, Any]]] = {
    "upload cut": (STORAGE, "cut_request", {"after": 100}), "upload damaged": (STORAGE, "corrupt_request", {}),
    "storage 503": (STORAGE, "status", {"status": 503}), "storage's answer lost": (STORAGE, "lost_reply", {}),
    "storage stalled": (STORAGE, "slow", {"seconds": 2}), "commit 503": (COMMIT, "status", {"status": 503}),
    "commit 429": (COMMIT, "status", {"status": 429, "headers": {"Retry-After": "2"}}),
    "commit's answer lost": (COMMIT, "lost_reply", {}), "commit stalled": (COMMIT, "slow", {"seconds": 2.5}),
    "creation 500": (CREATE, "status", {"status": 500}), "creation's answer lost": (CREATE, "lost_reply", {}),
    "who am I 502": ("/whoami", "status", {"status": 502}), "checksums cut": ("/tree/", "cut_response", {"after": 10}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "name"),
    cases(PASSING, {"storage 503", "storage stalled", "commit 503", "creation 500", "checksums cut"}),
    indirect=["client"],
)
def test_a_passing_fault_is_survived(name: str, hub: Loopback, client: Client, folder: Path) -> None:
    path, action, fields = PASSING[name]
    hub.fault(path, action, **fields)
    done, found = push_and_load(client, folder, limits=IMPATIENT if "stalled" in name else HURRIED)
    if name == "upload damaged" and "error" in done:  # the client does not try a refused upload again; a person does
        assert set(hub.files(REPO)) == set()
        done, found = push_and_load(client, folder)
    assert hub.fired() == 1
    assert done["commit"] == hub.head(REPO)
    assert found == jobs.logits(str(folder))
    if name == "commit 429":
        assert any("HTTP 429" in line and "in 2 s" in line for line in done["told"])


# name -> path, action, fields, what is told; they strike always
LASTING: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "upload cut": (STORAGE, "cut_request", {"after": 100}, "cannot be reached"),
    "storage 503": (STORAGE, "status", {"status": 503}, "503"),
    "commit 503": (COMMIT, "status", {"status": 503}, "has an internal error (HTTP 503: injected fault)"),
    "commit 429": (COMMIT, "status", {"status": 429}, "limits the rate of requests"),
    "commit 413": (COMMIT, "status", {"status": 413}, "are more than the Hub accepts in one commit"),
    "no room": (COMMIT, "status", {"status": 403, "message": "Private repository storage limit reached"},
                "no room left for alice/"),
    "commit stalled": (COMMIT, "slow", {"seconds": 8}, "cannot be reached"),
    "a long wait": (CREATE, "status", {"status": 429, "headers": {"Retry-After": "900"}}, "asks to wait 900 s"),
    "a wait to commit": (COMMIT, "status", {"status": 429, "headers": {"RateLimit": '"api";r=0;t=200'}},
                         "the Hub asks to wait 200 s before the upload (HTTP 429: injected fault); run the same"),
    "card 500": ("/validate-yaml", "status", {"status": 500}, "the Hub has an internal error"),
    "card cut": ("/validate-yaml", "cut_response", {"after": 10}, "cannot be reached"),
    "checksums 500": ("/tree/", "status", {"status": 500}, "comparing checksums failed"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("client", "name"),
    cases(LASTING, {"storage 503", "commit 429", "commit stalled", "card 500", "commit 413"}),
    indirect=["client"],
)
def test_a_lasting_fault_is_told(name: str, hub: Loopback, client: Client, folder: Path) -> None:
    path, action, fields, message = LASTING[name]
    hub.fault(path, action, times=-1, **fields)
    failed, nothing = push_and_load(client, folder, limits=IMPATIENT if "stalled" in name else HURRIED)
    assert message in failed["error"]
    assert not any(word in failed["error"] for word in ("\n", "role write", "max_shard_size", "sig="))
    complete = name == "checksums 500"
    if complete:
        assert f"main was changed meanwhile, to {hub.head(REPO)[:8]}" in failed["error"]
    else:
        assert "main is unchanged" in failed["error"] or path in (CREATE, "/validate-yaml")
        assert hub.files(REPO) == {}, "nothing half-pushed"
        assert isinstance(nothing, str), "and nothing loads"
    hub.clear_faults()
    assert assert_it_works_now(hub, client, folder)["changed"] is not complete


@pytest.mark.parametrize(
    ("client", "path", "words"),
    [
        ("lfs", r"^/lfs/", "Bad part 1"),
        ("lfs", "objects/batch", "LFS is off for alice"),
        ("xet", r"^/xet/v1/(xorbs|shards)", "400 Bad Request"),  # hf_xet tells the status alone
        ("xet", COMMIT, "No, thanks"),
    ],
    indirect=["client"],
)
def test_the_server_s_own_words_are_kept(path: str, words: str, hub: Loopback, client: Client, folder: Path) -> None:
    """In one line of the command, without the signed address, which the client's own log names at every attempt."""
    hub.fault(path, "status", status=400, times=-1, message=words)
    done = client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO])
    assert done.code == 1
    (line,) = done.err.strip().splitlines()
    assert line.startswith("hf-vit: the upload failed: ")
    assert words in line
    assert line.count("the upload") == 1
    assert "sig=" not in done.out + done.err


def refused(
    hub: Loopback, client: Client, folder: Path, token: str | None = "hf_alice_write", **options: object
) -> str:
    """The message of a push that must not have made anything."""
    wanted = options.get("repo_id", REPO)
    before = hub.get(f"/api/models/{wanted}")
    answer = client.run("hub.jobs:push", folder=str(folder), token=token, **options)
    assert "\n" not in answer["error"]
    assert hub.get(f"/api/models/{wanted}") == before
    return answer["error"]


def test_tokens(hub: Loopback, xet_client: Client, folder: Path) -> None:
    """None, a bad one, a stored one behind it; the command ends with one line."""
    stored = xet_client.home / "token"
    message = refused(hub, xet_client, folder, token=None)
    for words in ("there is no token", "HF_TOKEN", str(stored), "hf auth login"):
        assert words in message
    assert {entry["path"] for entry in hub.log()} == {f"/api/models/{REPO}"}, "only this test asked anything"
    done = xet_client.attempt("hub.jobs:command", arguments=["push", str(folder), REPO], token="hf_wrong")
    assert (done.code, done.out) == (1, "")
    (line,) = done.err.strip().splitlines()
    assert line.startswith("hf-vit: the token of the environment variable HF_TOKEN is invalid")
    assert "overrides" not in line
    xet_client.run("hub.jobs:stored_token", text="hf_alice_write")
    message = refused(hub, xet_client, folder, token="hf_wrong")
    assert f"overrides the one that `hf auth login` stored in {stored}" in message
    assert "commit" in xet_client.run("hub.jobs:push", folder=str(folder), token=None, repo_id="acme/x")
    xet_client.run("hub.jobs:stored_token", text="hf_stale")
    assert f"the token in {stored} is invalid" in refused(hub, xet_client, folder, token=None)


def test_no_right_to_write(hub: Loopback, xet_client: Client, folder: Path, make_model: Callable[..., Path]) -> None:
    message = refused(hub, xet_client, folder, token="hf_alice_read")
    assert "alice/my-vit must be created, but the token of" in message
    message = refused(hub, xet_client, folder, token="hf_bob_write")
    assert "has no right to create it; push to bob/my-vit" in message
    message = refused(hub, xet_client, folder, token="hf_bob_write", repo_id="acme/vit")
    assert "ask acme for write access" in message
    xet_client.run("hub.jobs:push", folder=str(folder))
    other = make_model("other", seed=5)
    for token in ("hf_alice_read", "hf_bob_write"):
        message = refused(hub, xet_client, other, token=token)
        assert "gives no right to write to alice/my-vit" in message
        assert "--create-pr" in message
    assert xet_client.run("hub.jobs:push", folder=str(other), token="hf_bob_write", create_pr=True)["pull_request"]


def test_what_the_hub_would_refuse(hub: Loopback, client: Client, model_folder: Path) -> None:
    """A card that passes our own checks; a file that is too large, by our limit and by the Hub's."""
    card = (model_folder / "README.md").read_text()
    (model_folder / "README.md").write_text("---\nlicense: nobody-knows-1.0\n---\nmine")
    message = refused(hub, client, model_folder)
    assert message.startswith('the Hub would refuse the card\'s metadata: "license" must be one of [')
    (model_folder / "README.md").write_text(card)
    size = (model_folder / WEIGHTS).stat().st_size
    message = refused(hub, client, model_folder, limits={"hub.contents.MAX_FILE_BYTES": size - 1})
    assert f"model.safetensors has {size:,} bytes, but the Hub takes at most {size - 1:,}" in message
    hub.limit(largest_lfs=size - 1)
    answer = client.run("hub.jobs:push", folder=str(model_folder))
    assert f"model.safetensors ({size:,} bytes) is larger than the Hub accepts" in answer["error"]
    assert hub.files(REPO) == {}
    hub.limit(largest_lfs=size)
    assert client.run("hub.jobs:push", folder=str(model_folder))["commit"] == hub.head(REPO)


def test_offline_unreachable_and_words_for_the_terminal(hub: Loopback, xet_client: Client, folder: Path) -> None:
    assert "offline mode is on" in xet_client.run("hub.jobs:push", folder=str(folder), offline=True)["error"]
    message = xet_client.run("hub.jobs:push", folder=str(folder), endpoint="http://127.0.0.1:1")["error"]
    assert "cannot be reached" in message
    assert "check the network" in message
    body = {"type": "user", "name": "\x1b[31mal\u202eice\x07", "orgs": [{"name": "alice", "roleInOrg": "write"}]}
    hub.fault("/whoami", "status", status=200, times=-1, body=body | {"auth": {}})
    told = xet_client.run("hub.jobs:push", folder=str(folder), dry_run=True)["told"]
    assert "as [31malice (" in " ".join(told)
    assert all(line.isprintable() for line in told)


def test_what_cannot_be_loaded_is_told(hub: Loopback, xet_client: Client, folder: Path) -> None:
    """Missing, private, gated, another revision: by `verify`, with and without a token."""

    def told(token: str | None, **options: object) -> str:
        return xet_client.run("hub.jobs:verify", token=token, **options)["error"]

    assert "alice/my-vit was not found on the Hub, or this token" in told("hf_alice_write")
    assert "alice/my-vit was not found on the Hub, or this token" in told(None)
    xet_client.run("hub.jobs:push", folder=str(folder))
    assert "has no such revision" in told("hf_alice_write", revision="v9")
    hub.settings(REPO, private=True)
    assert "was not found on the Hub, or this token" in told("hf_bob_write")
    assert "hf auth login" in told(None)
    hub.settings(REPO, private=False, gated="manual")
    gated, anonymous = told("hf_bob_write"), told(None)
    for message in (gated, anonymous):
        assert f"is gated: ask for access on {hub.endpoint}/{REPO}" in message
    assert f"{REPO}, then log in: run `hf auth login`" in anonymous
    assert gated.endswith("as the owner of the token of the environment variable HF_TOKEN")
    hub.settings(REPO, granted=["bob"])
    assert xet_client.run("hub.jobs:verify", token="hf_bob_write")["commit"] == hub.head(REPO)


def answer(status: int, **headers: str) -> Exception:
    http = sys.modules[errors.Response.__module__.partition(".")[0]]  # which library, depends on the version
    response = errors.Response(status, headers=headers, request=http.Request("GET", "https://hub/x"))
    return errors.HfHubHTTPError("no", response=response)


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (503, {"Retry-After": "7"}, 7), (503, {"Retry-After": "TOMORROW"}, 86400),
        (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0), (429, {"RateLimit": '"api";r=0;t=3'}, 3),
        (429, {"Retry-After": "9", "RateLimit": '"api";r=0;t=3'}, 9), (503, {"RateLimit": '"api";r=400;t=55'}, None),
        (503, {"Retry-After": "soon"}, None),
    ],
)  # fmt: skip
def test_how_long_a_server_asks_to_wait(status: int, headers: dict[str, str], seconds: float | None) -> None:
    tomorrow = format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True)
    asked = find_retry_after(
        answer(status, **{name: text.replace("TOMORROW", tomorrow) for name, text in headers.items()})
    )
    assert asked == (None if seconds is None else pytest.approx(seconds, abs=1))


def test_words_for_what_cannot_be_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and reasons with colours, turned writing or a signed address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for error in (OSError(errno.ENOSPC, "No space left"), RuntimeError("IO Error: No space left (os error 28)")):
        told = str(explain_hub_error(error, REPO))
        assert told.startswith("the disk is full (")
        assert "HF_HOME" in told
    assert "try again in 3 s" in str(explain_hub_error(answer(429, RateLimit='"api";r=0;t=3'), REPO))
    assert "try again later" in str(explain_hub_error(answer(429), REPO))
    error = RuntimeError("error sending request for url (https://cdn/lfs/ab?X-Amz-Signature=12&x=1)")
    assert summarize_error(error) == "error sending request for url (https://cdn/lfs/ab)"
    assert summarize_error(RuntimeError("\x1b[31mred\x07 \u202egnp\nlast")) == "[31mred gnp last"


def test_a_lost_answer_makes_no_second_pull_request(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]):
    xet_client.run("hub.jobs:push", folder=str(make_model("first", seed=1)))
    hub.fault(COMMIT, "lost_reply")
    done = xet_client.run("hub.jobs:push", folder=str(make_model("second", seed=2)), create_pr=True)
    proposals = hub.get(f"/api/models/{REPO}/refs?include_prs=1")["pullRequests"]
    assert [entry["targetCommit"] for entry in proposals] == [done["commit"]]


@pytest.mark.parametrize("client", ["lfs"], indirect=True)  # hf_xet asks which chunks the Hub knows: here none
def test_what_was_uploaded_is_not_sent_again(hub: Loopback, client: Client, folder: Path) -> None:
    hub.fault(COMMIT, "status", status=403, times=-1)
    client.run("hub.jobs:push", folder=str(folder))
    hub.clear_faults()
    before = [entry for entry in hub.log() if entry["path"].startswith("/lfs/")]
    assert before
    client.run("hub.jobs:push", folder=str(folder))
    assert hub.head(REPO)
    assert [entry for entry in hub.log() if entry["path"].startswith("/lfs/")] == before


def test_somebody_else_was_faster(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]) -> None:
    first, slow, fast = (make_model(name, seed=seed) for seed, name in enumerate(("first", "slow", "fast")))
    xet_client.run("hub.jobs:push", folder=str(first))
    hub.fault("/preupload/", "held")
    late = xet_client.start("hub.jobs:push", folder=str(slow))
    hub.wait_for_fault(late)
    winner = xet_client.run("hub.jobs:push", folder=str(fast))
    hub.clear_faults()
    assert "someone else changed" in late.wait().answer["error"]
    assert hub.head(REPO) == winner["commit"]
    assert_it_works_now(hub, xet_client, slow)


def test_two_writers_at_once_make_a_new_repository(hub: Loopback, xet_client: Client, make_model: Callable[..., Path]):
    folders = [make_model("left", seed=1), make_model("right", seed=2)]
    running = [xet_client.start("hub.jobs:push", folder=str(folder)) for folder in folders]
    commits = {job.wait().answer.get("commit"): folder for job, folder in zip(running, folders, strict=True)}
    assert xet_client.run("hub.jobs:logits", repo_id=REPO) == jobs.logits(str(commits[hub.head(REPO)]))


def assert_old_or_new(hub: Loopback, client: Client, first: str, old: Path, new: Path) -> None:
    wanted = old if hub.head(REPO) == first else new
    assert client.run("hub.jobs:logits", repo_id=REPO) == jobs.logits(str(wanted))
    assert_it_works_now(hub, client, new)


@pytest.mark.parametrize(("client", "path"), [("lfs", STORAGE), ("xet", STORAGE), ("xet", COMMIT)], indirect=["client"])
def test_killed_in_the_middle(path: str, hub: Loopback, client: Client, make_model: Callable[..., Path]) -> None:
    old, new = make_model("old", seed=1), make_model("new", seed=2)
    first = client.run("hub.jobs:push", folder=str(old))["commit"]
    hub.fault(path, "held")
    job = client.start("hub.jobs:push", folder=str(new))
    hub.wait_for_fault(job)
    job.kill()
    assert job.wait().code == -9
    hub.clear_faults()
    hub.settle()  # the server goes on with what it has
    assert path == COMMIT or hub.head(REPO) == first
    assert_old_or_new(hub, client, first, old, new)


def test_downloads_that_break_off_or_are_damaged(hub: Loopback, client: Client, folder: Path) -> None:
    """They go on, or are repaired: over LFS the client itself takes any bytes of the right number."""
    client.run("hub.jobs:push", folder=str(folder))
    hub.fault(STORED, "cut_response", after=1000)
    assert client.run("hub.jobs:verify")["repaired"] == []
    client.clear()
    hub.fault(STORED, "corrupt_response")
    found = client.run("hub.jobs:verify")
    assert hub.fired() == 2
    if client.transport == "lfs":
        assert len(found["repaired"]) == 1
    elif "error" in found:  # hf_xet checks what arrives
        found = client.run("hub.jobs:verify")
    assert "error" not in found
    assert client.run("hub.jobs:logits", repo_id=REPO) == jobs.logits(str(folder))
    client.clear()
    hub.fault(STORED, "corrupt_response", times=-1)
    found = client.run("hub.jobs:verify", limits=HURRIED)
    assert "error" in found
    if client.transport == "lfs":
        assert f"{WEIGHTS} of {REPO} still has a wrong checksum" in found["error"]
    hub.clear_faults()
    assert "error" not in client.run("hub.jobs:verify")
