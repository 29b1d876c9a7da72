"""`hf-vit verify`: what it runs, what it does not, and what that sees."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub import jobs
from loopback.client import Client, Loopback

from hf_vit.hub.card import MARKER, render_card

REPO = "alice/my-vit"
# Printed by an example of a card: what it finds of the user's secrets.
SEARCH = (
    "import os, huggingface_hub\n"
    "print('token', huggingface_hub.get_token(), [name for name in os.environ if 'TOKEN' in name or 'SECRET' in name],"
    " os.path.exists(os.path.expanduser('~/.secret')))\n"
)


def own_card(folder: Path, example: str) -> None:
    """The rendered card with one more example, as its author's own."""
    card = render_card(folder).replace(MARKER, "") + f"\n```python\n{example}```\n"
    (folder / "README.md").write_text(card)


def test_nothing_of_the_author_runs_unasked(
    hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path
) -> None:
    """A record's command that ends its block and begins another, which the card then holds: it is not our example."""
    traces = [tmp_path / name for name in ("from facts", "from card")]
    lines = [f"open({str(trace)!r}, 'w').close()\n" for trace in traces]
    own_card(model_folder, lines[0] + "```\n\n```python\n" + lines[1])
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    records = json.loads((model_folder / "facts.json").read_text())
    records[0]["command"] = f"x\n```\n\n```python\n{lines[0]}```\n\n```bash\nx"
    xet_client.run("hub.jobs:upload_raw", repo_id=REPO, files={"facts.json": json.dumps(records)})
    done = xet_client.attempt("hub.jobs:command", arguments=["verify", REPO], token=None)
    assert done.code == 0, done.err
    assert "every checksum agrees" in done.out
    assert f"commit {hub.head(REPO)}" in done.out
    label = jobs.label_of_noise(str(model_folder))
    assert f"this package's example printed: {label}\n" in done.out
    assert [f"not run: example {number} of the card is code of {REPO}" in done.out for number in (1, 2, 3, 4)] == [
        False, True, True, True,
    ]  # fmt: skip
    assert [trace.exists() for trace in traces] == [False, False]


def test_what_is_trusted_runs_without_a_token(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    """The card's example with the package, the one without it, and the author's own."""
    own_card(model_folder, SEARCH)
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    arguments = ["verify", REPO, "--trust-remote-code"]
    done = xet_client.attempt("hub.secret_jobs:command_with_secrets", arguments=arguments)
    assert done.code == 0, done.err
    label = jobs.label_of_noise(str(model_folder))
    printed = [line for line in done.out.splitlines() if " printed: " in line]
    assert printed == [
        f"this package's example printed: {label}",
        f"example 2 of the card printed: {label}",
        "example 3 of the card printed: token None [] False",
    ]
    assert "running example 3 of the card" in done.out


def replace_config(client: Client, folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    client.run("hub.jobs:upload_raw", repo_id=REPO, files={"config.json": json.dumps(config)})


def test_when_no_example_can_run_it_fails(hub: Loopback, xet_client: Client, model_folder: Path) -> None:
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\n```python\nimport sys\nsys.exit('ran')\n```\n")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    replace_config(xet_client, model_folder, model_type="their_own")
    done = xet_client.attempt("hub.jobs:command", arguments=["verify", REPO], token=None)
    assert done.code == 1
    assert "every checksum agrees, but no example was run: the architecture 'their_own' comes with code" in done.err
    told = xet_client.run("hub.jobs:verify", examples=True, trust_remote_code=True)["error"]
    assert told == "example 1 of the card fails: ran"
    (model_folder / "README.md").write_text("---\nlicense: mit\n---\nno example")
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    assert "has no example in Python" in xet_client.run("hub.jobs:verify", examples=True)["error"]


@pytest.mark.parametrize("name", ["{outside}", "../../../private.safetensors", "elsewhere.safetensors"])
def test_weights_of_another_place_are_refused(
    name: str, hub: Loopback, xet_client: Client, model_folder: Path, tmp_path: Path
) -> None:
    """An index that names a file of this machine: it would be loaded, and all would look well."""
    outside = tmp_path / "private.safetensors"
    outside.write_bytes((model_folder / "model.safetensors").read_bytes())
    xet_client.run("hub.jobs:push", folder=str(model_folder))
    index = {"metadata": {}, "weight_map": {"classifier.weight": name.format(outside=outside)}}
    xet_client.run("hub.jobs:upload_raw", repo_id=REPO, files={"model.safetensors.index.json": json.dumps(index)})
    told = xet_client.run("hub.jobs:verify", examples=True)["error"]
    assert "which is no file inside the model's folder" in told or "which is not in the repository" in told
