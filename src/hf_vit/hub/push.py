"""Push a model as one commit: checked before anything is created, retried within bounds, compared afterwards."""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile

from hf_vit.errors import UserError, one_line
from hf_vit.hub.contents import Contents, collect, differences, tell_of
from hf_vit.hub.model_folder import CARD_NAME
from hf_vit.hub.page_folder import collect_page
from hf_vit.hub.preflight import Destination, PushOptions, RepoType, check_card, check_repo_id, find_destination
from hf_vit.hub.push_result import PushResult
from hf_vit.repositories.failures import explain, token_source
from hf_vit.repositories.retrying import response_of, status_of, try_again
from hf_vit.results.facts import Facts, Record
from hf_vit.results.redaction import secret_in
from hf_vit.results.writing import scratch_folder

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel


_SHARD_SIZE = "5GB"


def push_to_hub(
    source: "str | os.PathLike[str] | PreTrainedModel",
    repo_id: str,
    *,
    processor: "BaseImageProcessor | None" = None,
    facts: Sequence[Record] = (),
    card: str | None = None,
    license: str | None = None,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    tag: str | None = None,
    collection: str | None = None,
    dry_run: bool = False,
    token: str | None = None,
    message: str | None = None,
    max_shard_size: int | str = _SHARD_SIZE,
    share_images: bool = False,
    space: bool = False,
    report: Callable[[str], None] | None = None,
) -> PushResult:
    """Share a model on the Hub: weights, config, code, image processor, card, pictures and facts in one commit.

    Everything that can be wrong is found before anything is created. Weights and code of earlier pushes that the new
    model does not have are deleted in the same commit. No pickle is shared. A failure that passes (429, 5xx, a broken
    connection) is retried within bounds; an interrupted push is repeated by the same call, which skips what the Hub
    has already. Afterwards the remote hashes are compared with the local ones.

    Args:
        source: folder of a saved model, or a model.
        repo_id: "user/name", or "name" for one of your own.
        processor: image processor of a model that is given as an object.
        facts: what is known about it (`hf_vit.results.facts.new_record`); a folder has its facts.json.
        card: README.md for a model object; by default it is rendered from the facts.
        license: Hub license id; by default the one of the folder's card, else the base model's.
        private: create a private repository.
        revision: branch to push to; made from main if it is not there.
        create_pr: propose the commit as a pull request.
        tag: name for the new commit.
        collection: title of a collection of the repository's owner, made if there is none, or the slug of one
            ("user/title-0123456789abcdef01234567"); the model is put into it.
        dry_run: check everything, change nothing.
        token: by default the one you are logged in with.
        message: title of the commit; by default "Share the model with hf-vit", or "Share the page with hf-vit".
        max_shard_size: larger weight files are split.
        share_images: share the pictures that show images of the data, too (mistakes, attention over images).
        space: `source` is the folder of a page (`hf-vit page`), which becomes a static Space.
        report: is told what is being done, a line at a time.

    Raises:
        UserError: says what is wrong, whether the branch was changed, and what to do.
    """
    check_repo_id(repo_id)
    _refuse_secrets({"name": repo_id, "branch": revision, "tag": tag, "title": message, "collection": collection})
    if space and max_shard_size != _SHARD_SIZE:
        raise UserError("--max-shard-size splits weight files, which a page does not have; leave it or --space out")
    options = PushOptions(private, revision, create_pr, tag, collection, token, space)
    message = message or f"Share the {'page' if space else 'model'} with hf-vit"

    def say(line: str) -> None:
        if report is not None:
            report(one_line(line))  # with words of the server

    with _shards_folder() as scratch:
        name = repo_id.rpartition("/")[2]
        folder = _as_folder(source, scratch / "model" / name, processor, facts, card, max_shard_size, space)
        shards = scratch / "shards"
        shards.mkdir()
        # Local trouble is told before the Hub is asked anything; the card needs the full name.
        chosen: dict[str, Any] = {"license": license, "share_images": share_images}
        if space:
            contents = collect_page(folder, **chosen)
        else:
            contents = collect(folder, repo_id, scratch=shards, max_shard_size=max_shard_size, **chosen)
        api = HfApi(token=token)
        destination = find_destination(api, repo_id, options, say)
        if destination.repo_id != repo_id and not space:
            contents = contents.with_files(tell_of(folder, destination.repo_id, license, share_images))
        return _Push(api, destination, contents, options, say).run(message, dry_run)


def _refuse_secrets(public: Mapping[str, str | None]) -> None:
    """Whatever all will read must be no token: what it is -> its words."""
    for what, words in public.items():
        if words is not None and (kind := secret_in(words)) is not None:
            raise UserError(f"the {what} looks like {kind} and would be public; give another one")


@contextmanager
def _shards_folder() -> Generator[Path]:
    """A temporary folder for shards, which may be large: a process that is told to end (SIGTERM) removes it as well."""
    with scratch_folder("push") as folder:

        def leave(number: int, frame: object) -> None:
            shutil.rmtree(folder, ignore_errors=True)  # now: uploads under way would be waited for first
            raise SystemExit(128 + number)

        is_ours = threading.current_thread() is threading.main_thread()
        is_ours = is_ours and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if is_ours:
            signal.signal(signal.SIGTERM, leave)
        try:
            yield folder
        finally:
            if is_ours:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_folder(
    source: "str | os.PathLike[str] | PreTrainedModel",
    folder: Path,
    processor: "BaseImageProcessor | None",
    facts: Sequence[Record],
    card: str | None,
    max_shard_size: int | str,
    space: bool,
) -> Path:
    """The folder of a model; a model object is saved in `folder`."""
    if isinstance(source, str | os.PathLike):
        if processor is not None or facts or card is not None:
            raise UserError("processor=, facts= and card= are for a model object; a folder contains its own")
        return Path(source)
    if space:
        raise UserError(
            "space=True needs the folder of a page; give its path, or leave space=True out to share a model"
        )
    if processor is None:
        raise UserError("a model is pushed with its image processor; give processor=")
    source.save_pretrained(folder, max_shard_size=max_shard_size)
    processor.save_pretrained(folder)
    if facts:
        Facts(records=list(facts)).save(folder)
    if card is not None:
        (folder / CARD_NAME).write_text(card, encoding="utf-8")
    return folder


class _Push:
    """One push to one place."""

    def __init__(
        self,
        api: HfApi,
        destination: Destination,
        contents: Contents,
        options: PushOptions,
        say: Callable[[str], None],
    ) -> None:
        self.api, self.destination, self.contents, self.options, self.say = api, destination, contents, options, say
        self.repo_id, self.branch = destination.repo_id, destination.branch
        self.repo_type: RepoType = options.repo_type
        self.url = f"{api.endpoint}/{'spaces/' * options.space}{self.repo_id}"
        self.stale = contents.stale(destination.files)
        self.parent = destination.head

    def run(self, message: str, dry_run: bool) -> PushResult:
        result = self._run(message, dry_run)
        if dry_run or self.options.collection is None:
            return result
        return replace(result, collection=self._into_collection(self.options.collection))

    def _run(self, message: str, dry_run: bool) -> PushResult:
        is_there = self.destination.exists and self._holds(self.destination.files)
        self._check_tag(is_there)
        check_card(self.contents.card, self.repo_type, self.say)
        self.say(self._plan())
        self.say(self._list())
        if dry_run:
            return self._result(None)
        if is_there:
            assert self.destination.head is not None
            if self.options.revision and not self.destination.branch_exists:
                self._attempt("creating the branch", self._make_branch)
            self._tag(self.destination.head)
            return self._result(self.destination.head, changed=False)
        if self.options.create_pr and (proposal := self._attempt("reading pull requests", self._proposal)):
            return self._result(proposal[0], changed=False, pull_request=proposal[1])
        self._make_place()
        commit, pull_request = self._attempt("the upload", lambda: self._commit(message), self._landed)
        self._compare(commit)
        self._tag(commit)
        return self._result(commit, pull_request=pull_request)

    def _check_tag(self, is_there: bool) -> None:
        """A tag that exists must name exactly what is pushed, and the branch must hold that: nothing is left to do."""
        commit = self.destination.tags.get(self.options.tag or "")
        if commit is None:
            return
        if is_there and commit == self.destination.head:
            return
        tag = f"{self.repo_id} has a tag {self.options.tag} already (at {commit[:8]})"
        if not self._holds(self._attempt("reading the tag", lambda: self._files(commit))):
            raise UserError(f"{tag}, with other content; choose another")
        if not is_there:
            raise UserError(
                f"{tag} with this content, but {self.branch} has changed since; leave --tag out to push to "
                f"{self.branch} again"
            )

    def _plan(self) -> str:
        new = (
            ""
            if self.destination.exists
            else f" (new, {'private' if self.options.private else 'public or as your default'})"
        )
        how = "as a pull request to" if self.options.create_pr else "to"
        text = (
            f"{len(self.contents.files)} files, {self.contents.size:,} bytes, {how} {self.repo_id}{new}, branch "
            f"{self.branch}, as {self.destination.user} (by {token_source(self.options.token is not None)})"
        )
        if self.stale:
            text += f"; deleting {', '.join(self.stale)}"
        if self.contents.left_out:
            text += f"; not shared: {', '.join(self.contents.left_out)}"
        return text

    def _list(self) -> str:
        """What others will be able to see, file by file."""
        files = ", ".join(f"{file.path} ({file.size:,} bytes)" for file in self.contents.files.values())
        readers = "private" if self.options.private else "public, unless the repository is private"
        told = (
            "the page shows classes and results"
            if self.options.space
            else "the card shows classes, command, data, machine and versions"
        )
        return f"{readers}: {files}; {told}"

    def _attempt(self, doing: str, action: Callable[[], Any], landed: Callable[[], Any] = lambda: None) -> Any:
        """An action on the Hub with retries; its failure says where the branch stands."""
        try:
            return try_again(action, doing, say=self.say, landed=landed)
        except UserError as error:
            raise UserError(f"{error}. {self._state()}") from error
        except Exception as error:
            if status_of(error) == 412:
                raise UserError(
                    f"{self.branch} of {self.repo_id} was changed by someone else meanwhile, so nothing was "
                    "pushed; review the change, then run the same command again"
                ) from error
            told = self._explain_size(error) or explain(
                error, self.repo_id, explicit_token=self.options.token is not None
            )
            raise UserError(f"{doing} failed: {told}. {self._state()}") from error

    def _explain_size(self, error: Exception) -> UserError | None:
        """Which file is too large, where the Hub names it by its hash alone, or not at all."""
        files = self.contents.files.values()
        response = response_of(error)
        if response is not None and response.status_code == 413 and "/commit/" in str(response.url):
            inline = [file for file in files if file.is_text]  # git's own files travel inside the commit
            largest = max(inline, key=lambda file: file.size)
            return UserError(
                f"the {len(inline)} text files ({sum(file.size for file in inline):,} bytes together, most of them in "
                f"{largest.path}) are more than the Hub takes in one commit; make {largest.path} smaller"
            )
        stored = [file for file in files if not file.is_text]
        named = [file for file in stored if file.sha256 in str(error)]
        if status_of(error) != 413 and not (named and "too large" in str(error).lower()):
            return None
        file = max(named or stored, key=lambda candidate: candidate.size)
        return UserError(
            f"{file.path} ({file.size:,} bytes) is larger than the Hub takes; use a smaller max_shard_size"
        )

    def _state(self) -> str:
        """Where the branch stands now, in words."""
        again = "Run the same command again; uploaded files are kept"
        try:
            heads = {
                ref.name: ref.target_commit
                for ref in self.api.list_repo_refs(self.repo_id, repo_type=self.repo_type).branches
            }
        except Exception:  # the failure that is being told is the one that matters
            return f"Whether {self.branch} was changed is unknown. {again}"
        if heads.get(self.branch) in (self.parent, None):
            return f"{self.branch} is unchanged. {again}"
        return f"{self.branch} was changed meanwhile, to {heads[self.branch][:8]}. {again}"

    def _make_place(self) -> None:
        """The repository and the branch, where they are not there yet."""
        if not self.destination.exists:
            private = self.options.private or None  # None: as the account's default
            self._attempt(
                "creating the repository",
                lambda: (
                    self.api.create_repo(
                        self.repo_id,
                        repo_type=self.repo_type,
                        private=private,
                        exist_ok=True,
                        space_sdk="static" if self.options.space else None,
                    ).repo_id
                ),
            )
            self.parent = self._attempt(
                "reading the repository", lambda: self.api.repo_info(self.repo_id, repo_type=self.repo_type).sha
            )
        if not self.destination.branch_exists:
            self._attempt("creating the branch", self._make_branch)

    def _make_branch(self) -> bool:
        self.api.create_branch(
            self.repo_id, repo_type=self.repo_type, branch=self.branch, revision=self.parent, exist_ok=True
        )
        return True

    def _commit(self, message: str) -> tuple[str, str | None]:
        added = [
            CommitOperationAdd(file.path, str(file.source) if isinstance(file.source, Path) else file.source)
            for file in self.contents.files.values()
        ]
        deleted = [CommitOperationDelete(path, is_folder=False) for path in self.stale]
        done = self.api.create_commit(
            self.repo_id,
            [*added, *deleted],
            repo_type=self.repo_type,
            commit_message=message,
            revision=None if self.options.create_pr else self.branch,
            parent_commit=self.parent,
            create_pr=self.options.create_pr,
        )
        return done.oid, done.pr_url

    def _landed(self) -> tuple[str, str | None] | None:
        """The commit of an attempt whose answer was lost."""
        if self.options.create_pr:
            return self._proposal()
        for branch in self.api.list_repo_refs(self.repo_id, repo_type=self.repo_type).branches:
            moved = branch.name == self.branch and branch.target_commit != self.parent
            if moved and self._holds(self._files(branch.target_commit)):
                return branch.target_commit, None
        return None

    def _proposal(self) -> tuple[str, str] | None:
        """Commit and address of an open pull request that holds exactly this."""
        refs = (
            self.api.list_repo_refs(self.repo_id, repo_type=self.repo_type, include_pull_requests=True).pull_requests
            or []
        )
        if not refs:
            return None
        opened = self.api.get_repo_discussions(
            self.repo_id, repo_type=self.repo_type, discussion_type="pull_request", discussion_status="open"
        )
        numbers = {str(discussion.num) for discussion in opened}
        for ref in refs:
            number = ref.ref.rpartition("/")[2]
            if number in numbers and self._holds(self._files(ref.target_commit)):
                return ref.target_commit, f"{self.url}/discussions/{number}"
        return None

    def _files(self, revision: str) -> dict[str, RepoFile]:
        tree = self.api.list_repo_tree(self.repo_id, repo_type=self.repo_type, revision=revision, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def _holds(self, remote: dict[str, RepoFile]) -> bool:
        return not self.contents.stale(remote) and not differences(self.contents.files, remote)

    def _compare(self, commit: str) -> None:
        remote = self._attempt("comparing checksums", lambda: self._files(commit))
        wrong = differences(self.contents.files, remote) + self.contents.stale(remote)
        if wrong:
            raise UserError(
                f"{self.repo_id} at {commit[:8]} differs from what was pushed: {', '.join(wrong)}; if the "
                "folder was written to meanwhile, run the same command again"
            )

    def _tag(self, commit: str) -> None:
        if self.options.tag is None:
            return
        name = self.options.tag
        self._attempt(
            "tagging",
            lambda: (
                self.api.create_tag(self.repo_id, repo_type=self.repo_type, tag=name, revision=commit, exist_ok=True)
                or True
            ),
        )

    def _into_collection(self, name: str) -> str:
        """Put the model into a collection, by its slug or title; the address of it."""
        slug = name
        if "/" not in name:
            owner, private = self.repo_id.split("/")[0], self.options.private
            slug = self._attempt(
                "creating the collection",
                lambda: self.api.create_collection(name, namespace=owner, private=private, exists_ok=True).slug,
            )
        return self._attempt(
            "adding to the collection",
            lambda: self.api.add_collection_item(slug, self.repo_id, self.repo_type, exists_ok=True).url,
        )

    def _result(self, commit: str | None, changed: bool = True, pull_request: str | None = None) -> PushResult:
        url = self.url + (f"/tree/{commit}" if commit else "")
        files = {file.path: file.size for file in self.contents.files.values()}
        return PushResult(self.repo_id, commit, url, files, self.stale, self.contents.left_out, changed, pull_request)
