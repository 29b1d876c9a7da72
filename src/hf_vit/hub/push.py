"""Push a model or a page as one commit: checked before anything is created, retried within bounds, compared afterwards.

`HfApi.create_commit` is used, as `upload_folder` spreads large folders over several commits.
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard, get_token
from huggingface_hub.errors import LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile, SpaceInfo

from hf_vit.display import Displayed
from hf_vit.errors import UserError, one_line
from hf_vit.hub.contents import Contents, collect, collect_page, describe_model, differences
from hf_vit.hub.model_folder import CARD_NAME
from hf_vit.repositories.hub import check_repo_id, explain, login_help, response_of, status_of, token_source, try_again
from hf_vit.results.facts import Facts, Record
from hf_vit.results.redaction import secret_in
from hf_vit.results.writing import scratch_folder

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel

_SHARD_SIZE = "5GB"
_BRANCH = re.compile(r"(?!refs/)(?!.*(\.\.|//|\.lock$|/$))[\w./+-]+")


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

    def describe(self) -> str:
        """Return a few lines for people: what is where."""
        where = self.pull_request or self.url
        if self.commit is None:
            text = f"nothing was changed (dry run); {self.repo_id} would be at {self.url}"
        elif not self.changed:
            place = f"an open pull request of {self.repo_id}" if self.pull_request else self.repo_id
            text = f"{place} already holds this content at commit {self.commit}\n{where}"
        else:
            size = f"{len(self.files)} files, {sum(self.files.values()):,} bytes, one commit"
            text = f"{size}; all remote checksums match\ncommit {self.commit}\n{where}"
        return text if self.collection is None else f"{text}\nin the collection {self.collection}"


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
    public = {"name": repo_id, "branch": revision, "tag": tag, "title": message, "collection": collection}
    for name, words in public.items():
        if words is not None and (kind := secret_in(words)) is not None:
            raise UserError(f"the {name} looks like {kind} and would be public; give another one")
    if space and max_shard_size != _SHARD_SIZE:
        raise UserError("--max-shard-size splits weight files, which a page does not have; leave it or --space out")

    def say(line: str) -> None:
        if report is not None:
            report(one_line(line))  # with words of the server

    push = Push(repo_id, private, revision, create_pr, tag, collection, token, space, say)
    with _shards_folder() as scratch:
        folder = scratch / "model" / repo_id.rpartition("/")[2]
        if isinstance(source, str | os.PathLike):
            if processor is not None or facts or card is not None:
                raise UserError("processor=, facts= and card= are for a model object; a folder contains its own")
            folder = Path(source)
        elif space:
            raise UserError(
                "space=True needs the folder of a page; give its path, or leave space=True out to share a model"
            )
        elif processor is None:
            raise UserError("a model is pushed with its image processor; give processor=")
        else:
            source.save_pretrained(folder, max_shard_size=max_shard_size)
            processor.save_pretrained(folder)
            if facts:
                Facts(records=list(facts)).save(folder)
            if card is not None:
                (folder / CARD_NAME).write_text(card, encoding="utf-8")
        # Local trouble is told before the Hub is asked anything; the card needs the full name.
        shards = scratch / "shards"
        shards.mkdir()
        shared: dict[str, Any] = {"license": license, "share_images": share_images}
        if space:
            contents = collect_page(folder, **shared)
        else:
            contents = collect(folder, repo_id, scratch=shards, max_shard_size=max_shard_size, **shared)
        push.find_destination()
        if push.repo_id != repo_id and not space:
            contents = contents.with_files(describe_model(folder, push.repo_id, **shared))
        result = push.run(contents, message or f"Share the {'page' if space else 'model'} with hf-vit", dry_run)
        return result if dry_run or collection is None else replace(result, collection=push.add_to_collection())


@contextmanager
def _shards_folder() -> Generator[Path]:
    """Make a temporary folder for shards, which may be large: a process told to end (SIGTERM) removes it as well."""
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


@dataclass(repr=False)  # a token is in it
class Push:
    """One push to one place: options as those of `push_to_hub`, then what `find_destination` finds."""

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    tag: str | None = None
    collection: str | None = None
    token: str | None = None
    space: bool = False
    say: Callable[[str], None] = lambda line: None

    user: str = field(default="", init=False)
    exists: bool = field(default=False, init=False)
    parent: str | None = field(default=None, init=False)  # head of the branch; None while there is no repository
    remote: dict[str, RepoFile] = field(default_factory=dict[str, RepoFile], init=False)
    tags: dict[str, str] = field(default_factory=dict[str, str], init=False)

    def __post_init__(self) -> None:
        for name, value in (("revision", self.revision), ("tag", self.tag)):
            if value is not None and not _BRANCH.fullmatch(value):
                raise UserError(f"'{value}' cannot be a {name}'s name; use letters, digits, -, _, . and /")
        if self.create_pr and self.revision not in (None, "main"):
            raise UserError(f"a pull request targets main; leave --revision {self.revision} out")
        if self.create_pr and self.tag:
            raise UserError("a pull request cannot be tagged; leave --tag out, and tag the commit after the merge")
        if self.create_pr and self.collection:
            raise UserError("a pull request cannot be added to a collection; leave --collection out until it is merged")
        check_repo_id(self.repo_id)
        self.api, self.has_token = HfApi(token=self.token), self.token is not None
        self.token_source = token_source(self.has_token)
        self.repo_type: Literal["model", "space"] = "space" if self.space else "model"
        self.branch = self.revision or "main"
        self.branch_exists = self.branch == "main"

    # Before: nothing is changed

    def find_destination(self) -> None:
        """Look at the repository and at the rights to it."""
        if not self.has_token and get_token() is None:
            raise UserError(f"there is no token for the Hub: {login_help()}")
        me = self._ask("the Hub", "checking your account on the Hub", self.api.whoami)
        self.user = me["name"]
        self.repo_id = self.repo_id if "/" in self.repo_id else f"{self.user}/{self.repo_id}"
        self._ask(self.repo_id, "reading the repository", lambda: self._look(me))

    def _ask(self, about: str, doing: str, action: Callable[[], Any]) -> Any:
        try:
            return try_again(action, doing, say=self.say)
        except LocalTokenNotFoundError as error:
            raise UserError(f"there is no token for the Hub: {login_help()}") from error
        except Exception as error:
            raise explain(error, about, explicit_token=self.has_token) from error

    def _look(self, me: dict[str, Any]) -> None:
        try:
            info = self.api.repo_info(**self._place)
        except RepositoryNotFoundError:
            return self._check_namespace(me)
        if not self.create_pr:
            self.api.auth_check(**self._place, write=True)
        if isinstance(info, SpaceInfo) and info.sdk != "static":
            raise UserError(
                f"{self.repo_id} is a Space of the SDK {info.sdk}, and a page needs a static one; give another name"
            )
        if self.private and not info.private:
            raise UserError(
                f"{self.repo_id} exists and is public, so --private cannot keep this push to yourself; make it private "
                "in its settings first, or give another name"
            )
        refs = self.api.list_repo_refs(**self._place)
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        self.tags = {ref.name: ref.target_commit for ref in refs.tags}
        if self.branch in self.tags:
            raise UserError(f"{self.branch} is a tag of {self.repo_id}, and tags cannot be moved; push to a branch")
        self.exists, self.branch_exists = True, self.branch in heads
        self.parent = heads.get(self.branch) or heads["main"]
        self.remote = self._files(self.parent)
        return None

    def _check_namespace(self, me: dict[str, Any]) -> None:
        """Check whether the token may create this repository: the Hub says so only when asked to create it."""
        (namespace, name), token = self.repo_id.split("/"), (me.get("auth") or {}).get("accessToken") or {}
        if self.create_pr:
            raise UserError(f"{self.repo_id} does not exist, so it cannot have pull requests; leave --create-pr out")
        if token.get("role") == "read":
            raise UserError(
                f"{self.token_source} is read-only, and {self.repo_id} must be created; use a token with the role write"
            )
        roles = {str(organization["name"]): organization.get("roleInOrg") for organization in me.get("orgs") or []}
        if namespace != self.user and roles.get(namespace, "none") in ("none", "read"):
            raise UserError(
                f"{self.repo_id} does not exist or cannot be seen, and {self.token_source} (of {self.user}) has no "
                f"right to create it: give {self.user}/{name}, or become a writing member of {namespace}"
            )

    # The push

    def run(self, contents: Contents, message: str, dry_run: bool) -> PushResult:
        """Share the contents in one commit, or nothing."""
        self.contents, self.stale = contents, contents.stale(self.remote)
        is_there = self.exists and self._holds(self.remote)
        self._check_tag(is_there)
        self._check_card(contents.card)
        self._tell_plan()
        if dry_run:
            return self._result(None)
        if is_there:
            if self.revision and not self.branch_exists:
                self._attempt("creating the branch", self._make_branch)
            self._tag(self.parent)
            return self._result(self.parent, changed=False)
        if self.create_pr and (proposal := self._attempt("reading pull requests", self._proposal)):
            return self._result(proposal[0], changed=False, pull_request=proposal[1])
        self._make_place()
        commit, pull_request = self._attempt("the upload", lambda: self._commit(message), self._landed)
        remote = self._attempt("comparing checksums", lambda: self._files(commit))
        if wrong := differences(contents.files, remote) + contents.stale(remote):
            raise UserError(
                f"{self.repo_id} at {commit[:8]} differs from what was pushed: {', '.join(wrong)}; if the "
                "folder was written to meanwhile, run the same command again"
            )
        self._tag(commit)
        return self._result(commit, pull_request=pull_request)

    def _check_tag(self, is_there: bool) -> None:
        """A tag that exists must name exactly what is pushed, and the branch must hold that: nothing is left to do."""
        commit = self.tags.get(self.tag or "")
        if commit is None or (is_there and commit == self.parent):
            return
        tag = f"{self.repo_id} has a tag {self.tag} already (at {commit[:8]})"
        if not self._holds(self._attempt("reading the tag", lambda: self._files(commit))):
            raise UserError(f"{tag}, with other content; choose another")
        if not is_there:
            raise UserError(
                f"{tag} with this content, but {self.branch} has changed since; leave --tag out to push to "
                f"{self.branch} again"
            )

    def _check_card(self, card: str) -> None:
        """Let the Hub itself judge the card's metadata."""
        try:
            try_again(lambda: RepoCard(card).validate(self.repo_type), "checking the card", say=self.say)
        except Exception as error:
            if type(error) is not ValueError:
                raise explain(error, "the Hub") from error
            messages = re.findall(r'"message":\s*"((?:[^"\\]|\\.)*)"', str(error))
            words = "; ".join(message.replace('\\"', '"') for message in messages) or str(error)
            raise UserError(f"the Hub would refuse the card's metadata: {words}") from error

    def _tell_plan(self) -> None:
        """Say what will be done, and file by file what others will be able to see."""
        files, contents = self.contents.files.values(), self.contents
        new = "" if self.exists else f" (new, {'private' if self.private else 'public or as your default'})"
        how = "as a pull request to" if self.create_pr else "to"
        plan = (
            f"{len(files)} files, {contents.size:,} bytes, {how} {self.repo_id}{new}, branch {self.branch}, as "
            f"{self.user} (by {self.token_source})"
        )
        plan += f"; deleting {', '.join(self.stale)}" if self.stale else ""
        self.say(plan + (f"; not shared: {', '.join(contents.left_out)}" if contents.left_out else ""))
        readers = "private" if self.private else "public, unless the repository is private"
        listed = ", ".join(f"{file.path} ({file.size:,} bytes)" for file in files)
        told = "the card shows classes, command, data, machine and versions"
        told = "the page shows classes and results" if self.space else told
        self.say(f"{readers}: {listed}; {told}")

    def _make_place(self) -> None:
        """Make the repository and the branch, where they are not there yet."""
        if not self.exists:
            settings: dict[str, Any] = {"space_sdk": "static"} if self.space else {}
            settings |= {"private": True} if self.private else {}  # else as the account's default
            self._attempt(
                "creating the repository", lambda: self.api.create_repo(**self._place, **settings, exist_ok=True)
            )
            self.parent = self._attempt("reading the repository", lambda: self.api.repo_info(**self._place).sha)
        if not self.branch_exists:
            self._attempt("creating the branch", self._make_branch)

    def _make_branch(self) -> None:
        self.api.create_branch(**self._place, branch=self.branch, revision=self.parent, exist_ok=True)

    def _commit(self, message: str) -> tuple[str, str | None]:
        files, deleted = self.contents.files.values(), [CommitOperationDelete(path, False) for path in self.stale]
        sources = {each.path: str(each.source) if isinstance(each.source, Path) else each.source for each in files}
        done = self.api.create_commit(
            **self._place,
            operations=[*(CommitOperationAdd(path, source) for path, source in sources.items()), *deleted],
            commit_message=message,
            revision=None if self.create_pr else self.branch,
            parent_commit=self.parent,
            create_pr=self.create_pr,
        )
        return done.oid, done.pr_url

    def _landed(self) -> tuple[str, str | None] | None:
        """Return the commit of an attempt whose answer was lost."""
        if self.create_pr:
            return self._proposal()
        head = self._heads().get(self.branch)
        return (head, None) if head not in (None, self.parent) and self._holds(self._files(head)) else None

    def _proposal(self) -> tuple[str, str] | None:
        """Return commit and address of an open pull request that holds exactly this."""
        if not (refs := self.api.list_repo_refs(**self._place, include_pull_requests=True).pull_requests):
            return None
        opened = self.api.get_repo_discussions(**self._place, discussion_type="pull_request", discussion_status="open")
        numbers = {str(discussion.num) for discussion in opened}
        for ref in refs:
            number = ref.ref.rpartition("/")[2]
            if number in numbers and self._holds(self._files(ref.target_commit)):
                return ref.target_commit, f"{self._url}/discussions/{number}"
        return None

    def _heads(self) -> dict[str, str]:
        refs = self.api.list_repo_refs(**self._place)
        return {ref.name: ref.target_commit for ref in refs.branches}

    def _files(self, revision: str) -> dict[str, RepoFile]:
        tree = self.api.list_repo_tree(**self._place, revision=revision, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def _holds(self, remote: dict[str, RepoFile]) -> bool:
        return not self.contents.stale(remote) and not differences(self.contents.files, remote)

    def _tag(self, commit: str | None) -> None:
        if (name := self.tag) is not None:
            self._attempt(
                "tagging", lambda: self.api.create_tag(**self._place, tag=name, revision=commit, exist_ok=True)
            )

    def add_to_collection(self) -> str:
        """Put the repository into the collection, by its slug or title, and return its address."""
        slug, owner = str(self.collection), self.repo_id.partition("/")[0]
        if "/" not in slug:
            settings: dict[str, Any] = {"title": slug, "namespace": owner, "private": self.private}
            slug = self._attempt(
                "creating the collection", lambda: self.api.create_collection(**settings, exists_ok=True).slug
            )
        return self._attempt(
            "adding to the collection",
            lambda: self.api.add_collection_item(slug, self.repo_id, self.repo_type, exists_ok=True).url,
        )

    @property
    def _place(self) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}

    @property
    def _url(self) -> str:
        return f"{self.api.endpoint}/{'spaces/' * self.space}{self.repo_id}"

    def _result(self, commit: str | None, changed: bool = True, pull_request: str | None = None) -> PushResult:
        url = self._url + (f"/tree/{commit}" if commit else "")
        files = {file.path: file.size for file in self.contents.files.values()}
        return PushResult(self.repo_id, commit, url, files, self.stale, self.contents.left_out, changed, pull_request)

    # Failures

    def _attempt(self, doing: str, action: Callable[[], Any], landed: Callable[[], Any] = lambda: None) -> Any:
        """Do something on the Hub, with retries; its failure says where the branch stands."""
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
            told = self._explain_size(error) or explain(error, self.repo_id, explicit_token=self.has_token)
            raise UserError(f"{doing} failed: {told}. {self._state()}") from error

    def _explain_size(self, error: Exception) -> str | None:
        """Say which file is too large, where the Hub names it by its hash alone, or not at all."""
        files, response = self.contents.files.values(), response_of(error)
        inline = [file for file in files if file.is_text]  # git's own files travel inside the commit
        stored = [file for file in files if not file.is_text]
        if response is not None and response.status_code == 413 and "/commit/" in str(response.url):
            largest = max(inline, key=lambda file: file.size)
            return (
                f"the {len(inline)} text files ({sum(file.size for file in inline):,} bytes together, most of them in "
                f"{largest.path}) are more than the Hub takes in one commit; make {largest.path} smaller"
            )
        named = [file for file in stored if file.sha256 in str(error)]
        if status_of(error) != 413 and not (named and "too large" in str(error).lower()):
            return None
        largest = max(named or stored, key=lambda file: file.size)
        return f"{largest.path} ({largest.size:,} bytes) is larger than the Hub takes; use a smaller max_shard_size"

    def _state(self) -> str:
        """Say where the branch stands now."""
        again = "Run the same command again; uploaded files are kept"
        try:
            head = self._heads().get(self.branch)
        except Exception:  # the failure that is being told is the one that matters
            return f"Whether {self.branch} was changed is unknown. {again}"
        if head in (self.parent, None):
            return f"{self.branch} is unchanged. {again}"
        return f"{self.branch} was changed meanwhile, to {head[:8]}. {again}"
