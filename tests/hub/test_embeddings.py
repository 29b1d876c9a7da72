"""`embed` writes its files into a repository of the Hub."""

from hub.conftest import save_model
from loopback.client import content_hash

from hf_vit.evaluation import embed


def test_files_of_the_hub_are_those_of_a_disk(hub, xet_client, tmp_path):
    given = {"model": str(save_model(tmp_path / "model")), "data": "digits", "splits": ["test"], "rows_per_file": 100}
    embed(output=tmp_path / "disk", **given)
    parts = {path.name: path.read_bytes() for path in (tmp_path / "disk").glob("*.parquet")}
    told = xet_client.run("hub.jobs:embed_into", repo_id="alice/vectors", within="digits", **given)
    assert told[0].startswith("hf://alice/vectors/digits/manifest.json cannot be written: there is no such"), told
    assert told[1:] == [0, len(parts)]
    there = hub.files("alice/vectors")
    assert there.pop("digits/manifest.json")
    assert {name: there.get(f"digits/{name}") for name in parts} == {
        name: content_hash(content, lfs=True) for name, content in parts.items()
    }
