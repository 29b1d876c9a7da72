"""What a push did, and how it is told."""

from dataclasses import dataclass, field, replace

from hf_vit.display import Displayed


@dataclass(frozen=True, repr=False)
class PushResult(Displayed):
    """What a push did.

    Attributes:
        repo_id: user/name.
        commit: id of the commit that holds the model; None after a dry run.
        url: where to look at it.
        files: path -> size in bytes of what is shared.
        deleted: what was left of earlier pushes and went with the same commit.
        left_out: names in the folder that are not shared.
        changed: False if the repository, or an open pull request of it, held exactly this already.
        pull_request: address of the pull request, if the commit is one.
        collection: address of the collection that the model is in now, if one was named.
    """

    repo_id: str
    commit: str | None
    url: str
    files: dict[str, int]
    deleted: list[str]
    left_out: list[str] = field(default_factory=list[str])
    changed: bool = True
    pull_request: str | None = None
    collection: str | None = None

    def overview(self) -> dict[str, object]:
        files = f"{len(self.files):,}, {sum(self.files.values()):,} bytes"
        return {"repository": self.repo_id, "commit": self.commit or "none", "files": files, "url": self.url}


def describe(result: PushResult) -> str:
    """A few lines for people: what is where."""
    if result.collection is not None:
        return f"{describe(replace(result, collection=None))}\nin the collection {result.collection}"
    if result.commit is None:
        return f"nothing was changed (dry run); {result.repo_id} would be at {result.url}"
    if not result.changed:
        where = f"an open pull request of {result.repo_id}" if result.pull_request else result.repo_id
        return f"{where} already holds this content at commit {result.commit}\n{result.pull_request or result.url}"
    lines = [
        f"{len(result.files)} files, {sum(result.files.values()):,} bytes, one commit; all remote checksums match",
        f"commit {result.commit}",
        result.pull_request or result.url,
    ]
    return "\n".join(lines)
