"""Push a model or a page to the Hub in one commit, and compare the result with the local files.

`HfApi.create_commit` is used because `upload_folder` spreads large folders over several commits.
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile, SpaceInfo

from hf_vit.display import Displayed
from hf_vit.errors import UserError, to_one_line
from hf_vit.hub.contents import Contents, collect, collect_gradio, collect_page, describe_model, find_differences
from hf_vit.hub.model_folder import CARD_NAME
from hf_vit.repositories.hub import check_repo_id, describe_token, explain_hub_error, find_response, find_status, retry
from hf_vit.results.facts import Facts, Record
from hf_vit.results.redaction import find_secret
from hf_vit.writing import make_scratch_folder

if TYPE_CHECKING:
    from transformers import BaseImageProcessor, PreTrainedModel

_SHARD_SIZE = "5GB"
_BRANCH = re.compile(r"(?!refs/)(?!.*(\.\.|//|\.lock$|/$))[\w./+-]+")


@dataclass(frozen=True, repr=False)
class PushResult(Displayed):
    """The result of a push.

    Attributes:
        repo_id: user/name.
        commit: id of the commit that holds the files; None after a dry run.
        url: URL of the repository at that commit.
        files: path -> size in bytes of the shared files.
        deleted: files of earlier pushes that the commit deletes.
        left_out: names in the folder that are not shared.
        changed: False if the repository, or an open pull request, already had this content.
        pull_request: URL of the pull request, if one was made.
        collection: URL of the collection, if the model was added to one.
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
        """Return repository, commit, size and URL."""
        files = f"{len(self.files):,}, {sum(self.files.values()):,} bytes"
        return {"repository": self.repo_id, "commit": self.commit or "none", "files": files, "url": self.url}

    def describe(self) -> str:
        """Return a summary of a few lines for the terminal."""
        url = self.pull_request or self.url
        if self.commit is None:
            text = f"nothing was changed (dry run); {self.repo_id} would be at {self.url}"
        elif not self.changed:
            holder = f"an open pull request of {self.repo_id}" if self.pull_request else self.repo_id
            text = f"{holder} already holds this content at commit {self.commit}\n{url}"
        else:
            size = f"{len(self.files)} files, {sum(self.files.values()):,} bytes, one commit"
            text = f"{size}; all remote checksums match\ncommit {self.commit}\n{url}"
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
    space: bool | str = False,
    report: Callable[[str], None] | None = None,
) -> PushResult:
    """Share a model on the Hub: weights, config, code, image processor, card, plots and facts in one commit.

    All checks run before anything is created. The commit deletes weights and code of earlier pushes that the new model
    does not have. Pickle files are never shared. Temporary failures (429, 5xx, a broken connection) are retried a
    limited number of times. If a push is interrupted, the same call continues and skips files that are already
    uploaded. Finally the remote hashes are compared with the local ones.

    Args:
        source: folder of a saved model, or a model object.
        repo_id: "user/name", or "name" for a repository of your own.
        processor: image processor for a model object.
        facts: records for a model object (see `hf_vit.results.facts.make_record`); a folder has its own facts.json.
        card: README.md for a model object; by default it is rendered from the facts.
        license: Hub license id; by default the one in the folder's card, else the base model's.
        private: create the repository as private.
        revision: branch to push to; it is created from main if it does not exist.
        create_pr: open a pull request instead of committing to the branch.
        tag: tag for the new commit.
        collection: title of a collection of the repository's owner, created if needed, or the slug of an existing one
            ("user/title-0123456789abcdef01234567"); the model is added to it.
        dry_run: run all checks without changing anything.
        token: Hub token; by default the one you are logged in with.
        message: title of the commit; by default "Share the model with hf-vit", or "Share the page with hf-vit".
        max_shard_size: larger weight files are split into shards of this size.
        share_images: include plots that show images of the data (mistakes, attention over images).
        space: True or "static": `source` is the folder of a page (`hf-vit page`), which becomes a static Space.
            "gradio": `source` is the folder of a model, which becomes a Space with a Gradio app.
        report: called with each line of progress.

    Returns:
        The commit, its files and URLs.

    Raises:
        UserError: the push failed; the message states whether the branch was changed and what to do.
    """
    public_texts = {"name": repo_id, "branch": revision, "tag": tag, "title": message, "collection": collection}
    for name, value in public_texts.items():
        token_kind = find_secret(value or "")
        if token_kind is not None:
            raise UserError(f"the {name} looks like {token_kind} and would be public; choose another {name}")
    sdk: str | None = "static" if space is True else space or None
    if sdk not in (None, "static", "gradio"):
        raise UserError(f"unknown kind of Space '{sdk}'; give static for a page, or gradio for a model")
    if sdk == "static" and max_shard_size != _SHARD_SIZE:
        raise UserError("--max-shard-size splits weight files, which a page does not have; leave one of them out")

    def report_line(line: str) -> None:
        if report is not None:
            report(to_one_line(line))  # one line, as it may contain text from the server

    push = Push(repo_id, private, revision, create_pr, tag, collection, token, sdk, report_line)
    with _make_shards_folder() as scratch:
        if isinstance(source, str | os.PathLike):
            folder = Path(source)
            if processor is not None or facts or card is not None:
                raise UserError("processor=, facts= and card= are for a model object, not for a folder; leave them out")
        else:
            if sdk == "static":
                raise UserError("space=True needs the folder of a page; leave it out to share a model")
            if processor is None:
                raise UserError("a model object needs its image processor; pass processor=")
            folder = scratch / "model" / repo_id.rpartition("/")[2]
            source.save_pretrained(folder, max_shard_size=max_shard_size)
            processor.save_pretrained(folder)
            if facts:
                Facts(records=list(facts)).save(folder)
            if card is not None:
                (folder / CARD_NAME).write_text(card, encoding="utf-8")
        # Collect the files first, as local errors must come before the first request.
        shards = scratch / "shards"
        shards.mkdir()
        options: dict[str, Any] = {"license": license, "share_images": share_images}
        if sdk == "static":
            contents = collect_page(folder, **options)
        else:
            collect_files = collect if sdk is None else collect_gradio
            contents = collect_files(folder, repo_id, scratch=shards, max_shard_size=max_shard_size, **options)
        push.find_destination()
        if push.repo_id != repo_id and sdk is None:  # the card names the repository, now with the user's name
            contents = contents.with_files(describe_model(folder, push.repo_id, **options))
        shared = "page" if sdk == "static" else "model"
        result = push.run(contents, message or f"Share the {shared} with hf-vit", dry_run)
        return result if dry_run or collection is None else replace(result, collection=push.add_to_collection())


@contextmanager
def _make_shards_folder() -> Generator[Path]:
    """Yield a temporary folder for shards, which may be large; it is also removed if the process receives SIGTERM."""
    with make_scratch_folder("push") as folder:

        def remove_and_exit(number: int, frame: object) -> None:
            shutil.rmtree(folder, ignore_errors=True)  # at once: the interpreter would first wait for running uploads
            raise SystemExit(128 + number)

        is_main_thread = threading.current_thread() is threading.main_thread()
        if not is_main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield folder
            return
        signal.signal(signal.SIGTERM, remove_and_exit)
        try:
            yield folder
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclass(repr=False)  # a token is in it
class Push:
    """One push to one repository, with the options of `push_to_hub`; `find_destination` sets the other fields."""

    repo_id: str
    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    tag: str | None = None
    collection: str | None = None
    token: str | None = None
    sdk: str | None = None  # of a Space
    report: Callable[[str], None] = lambda line: None

    user: str = field(default="", init=False)
    is_read_only: bool = field(default=False, init=False)  # whether the token may not write
    roles: dict[str, str | None] = field(default_factory=dict[str, str | None], init=False)  # in organizations
    exists: bool = field(default=False, init=False)
    parent: str | None = field(default=None, init=False)  # head of the branch; None while there is no repository
    remote: dict[str, RepoFile] = field(default_factory=dict[str, RepoFile], init=False)
    tags: dict[str, str] = field(default_factory=dict[str, str], init=False)

    def __post_init__(self) -> None:
        """Set what follows from the options; raise a UserError for names that the Hub refuses, and for conflicts."""
        for name, value in (("revision", self.revision), ("tag", self.tag)):
            if value is not None and not _BRANCH.fullmatch(value):
                raise UserError(f"'{value}' cannot be the name of a {name}; use letters, digits, -, _, . and /")
        if self.create_pr and self.revision not in (None, "main"):
            raise UserError(f"a pull request always targets main, not {self.revision}; leave --revision out")
        if self.create_pr and self.tag:
            raise UserError("a pull request cannot be tagged; leave --tag out, and tag the commit after the merge")
        if self.create_pr and self.collection:
            raise UserError("a pull request cannot be in a collection; leave --collection out until it is merged")
        check_repo_id(self.repo_id)
        self.api = HfApi(token=self.token)
        self.has_token = self.token is not None
        self.token_source = describe_token(self.has_token)
        self.repo_type: Literal["model", "space"] = "space" if self.sdk else "model"
        self.branch = self.revision or "main"
        self.branch_exists = self.branch == "main"  # of a new repository; `_read_repository` corrects it

    def find_destination(self) -> None:
        """Complete `repo_id` with the user's name, read the repository, and check the user's rights to it."""
        account: Any = self._request("the Hub", "checking your account on the Hub", self.api.whoami)
        try:
            self.user = account["name"]
            self.is_read_only = ((account.get("auth") or {}).get("accessToken") or {}).get("role") == "read"
            self.roles = {each["name"]: each.get("roleInOrg") for each in account.get("orgs") or ()}
        except (AttributeError, LookupError, TypeError) as error:
            raise UserError("the Hub's answer about your account cannot be read; check HF_ENDPOINT") from error
        self.repo_id = self.repo_id if "/" in self.repo_id else f"{self.user}/{self.repo_id}"
        self._request(self.repo_id, "reading the repository", self._read_repository)

    def _request(self, target: str, action_name: str, action: Callable[[], Any]) -> Any:
        """Send a request with retries; raise its failure as a UserError."""
        try:
            return retry(action, action_name, report=self.report)
        except Exception as error:
            raise explain_hub_error(error, target, explicit_token=self.has_token) from error

    def _read_repository(self) -> None:
        """Read branches, tags and files of the repository, and check that it can be pushed to or created."""
        try:
            info = self.api.repo_info(**self._repository)
        except RepositoryNotFoundError:
            self._check_namespace()
            return
        self.repo_id = info.id  # a renamed repository is found by its former name, too
        if not self.create_pr:
            self.api.auth_check(**self._repository, write=True)
        if isinstance(info, SpaceInfo) and info.sdk != self.sdk:
            need = "a page needs a static Space" if self.sdk == "static" else f"an app needs the SDK {self.sdk}"
            raise UserError(f"{self.repo_id} is a Space with the SDK {info.sdk}, but {need}; choose another name")
        if self.private and not info.private:
            raise UserError(f"{self.repo_id} exists and is public; make it private on the Hub, or choose another name")
        refs = self.api.list_repo_refs(**self._repository)
        heads = {ref.name: ref.target_commit for ref in refs.branches}
        self.tags = {ref.name: ref.target_commit for ref in refs.tags}
        if self.branch in self.tags:
            raise UserError(f"{self.branch} is a tag of {self.repo_id}, and tags cannot be moved; push to a branch")
        self.exists = True
        self.branch_exists = self.branch in heads
        self.parent = heads.get(self.branch) or heads["main"]
        self.remote = self._list_files(self.parent)

    def _check_namespace(self) -> None:
        """Check whether the token may create this repository; the Hub itself would report that only during creation."""
        namespace, name = self.repo_id.split("/")
        token = self.token_source
        if self.create_pr:
            raise UserError(f"{self.repo_id} does not exist, so it has no pull requests; leave --create-pr out")
        if self.is_read_only:
            raise UserError(f"{self.repo_id} must be created, but {token} is read-only; use one with the role write")
        if namespace != self.user and self.roles.get(namespace, "none") in ("none", "read"):
            problem = f"{token} (of {self.user}) has no right to create it"
            remedy = f"push to {self.user}/{name}, or ask {namespace} for write access"
            raise UserError(f"{self.repo_id} does not exist or cannot be seen, and {problem}; {remedy}")

    def run(self, contents: Contents, message: str, dry_run: bool) -> PushResult:
        """Share the contents in one commit with the title `message`, or nothing; a dry run only checks."""
        self.contents = contents
        if self.sdk is None:  # the app of a Space runs this package's handler
            leave_theirs = partial(contents.without_handler, self.remote, self._read)
            self.contents = contents = self._attempt("reading the handler", leave_theirs)
        self.stale = contents.find_stale(self.remote)
        is_current = self.exists and self._matches_contents(self.remote)
        self._check_tag(is_current)
        self._check_card(contents.card)
        self._report_plan()
        if dry_run:
            return self._make_result(None)
        if is_current:
            if self.revision and not self.branch_exists:
                self._attempt("creating the branch", self._create_branch)
            self._create_tag(self.parent)
            return self._make_result(self.parent, changed=False)
        open_pull_request = self._attempt("reading pull requests", self._find_pull_request) if self.create_pr else None
        if open_pull_request is not None:
            commit, url = open_pull_request
            return self._make_result(commit, changed=False, pull_request=url)
        self._create_repository()
        commit, pull_request = self._attempt("the upload", lambda: self._commit(message), self._find_lost_commit)
        remote = self._attempt("comparing checksums", lambda: self._list_files(commit))
        differing_paths = find_differences(contents.files, remote) + contents.find_stale(remote)
        if differing_paths:
            problem = f"{', '.join(differing_paths)} of {self.repo_id} at {commit[:8]} differ from what was pushed"
            raise UserError(f"{problem}; run the same command again, without changing the folder meanwhile")
        self._create_tag(commit)
        return self._make_result(commit, pull_request=pull_request)

    def _check_tag(self, is_current: bool) -> None:
        """Raise a UserError if the tag exists with other content, or if the branch has changed since."""
        commit = self.tags.get(self.tag or "")
        if commit is None or (is_current and commit == self.parent):
            return
        tag = f"{self.repo_id} has a tag {self.tag} already (at {commit[:8]})"
        if not self._matches_contents(self._attempt("reading the tag", lambda: self._list_files(commit))):
            raise UserError(f"{tag} with other content; choose another tag")
        if not is_current:
            raise UserError(f"{tag} with this content, but {self.branch} has changed since; leave --tag out to push")

    def _check_card(self, card: str) -> None:
        """Let the Hub validate the card's metadata."""
        try:
            retry(lambda: RepoCard(card).validate(self.repo_type), "checking the card", report=self.report)
        except Exception as error:
            if type(error) is not ValueError:  # the client raises it for metadata that the Hub refuses
                raise explain_hub_error(error, "the Hub") from error
            # The Hub's answer is JSON inside the error's text.
            messages = re.findall(r'"message":\s*"((?:[^"\\]|\\.)*)"', str(error))
            reasons = "; ".join(message.replace('\\"', '"') for message in messages) or str(error)
            raise UserError(f"the Hub would refuse the card's metadata: {reasons}; correct {CARD_NAME}") from error

    def _report_plan(self) -> None:
        """Report what will be pushed, and which files and facts others will be able to see."""
        files = self.contents.files.values()
        kind = "as a pull request to" if self.create_pr else "to"
        plan = f"{len(files)} files, {self.contents.size:,} bytes, {kind} {self.repo_id}"
        if not self.exists:
            plan += f" (new, {'private' if self.private else 'public or as your default'})"
        plan += f", branch {self.branch}, as {self.user} (by {self.token_source})"
        if self.stale:
            plan += f"; deleting {', '.join(self.stale)}"
        if self.contents.skipped:
            plan += f"; not shared: {', '.join(self.contents.skipped)}"
        self.report(plan)
        readers = "private" if self.private else "public, unless the repository is private"
        file_list = ", ".join(f"{file.path} ({file.size:,} bytes)" for file in files)
        card = "the card shows classes, command, data, machine and versions"
        self.report(f"{readers}: {file_list}; {'the page shows classes and results' if self.sdk else card}")

    def _create_repository(self) -> None:
        if not self.exists:
            settings: dict[str, Any] = {"space_sdk": self.sdk} if self.sdk else {}
            settings |= {"private": True} if self.private else {}  # otherwise the account's default applies
            create = partial(self.api.create_repo, **self._repository, **settings, exist_ok=True)
            self._attempt("creating the repository", create)
            self.parent = self._attempt("reading the repository", lambda: self.api.repo_info(**self._repository).sha)
        if not self.branch_exists:
            self._attempt("creating the branch", self._create_branch)

    def _create_branch(self) -> None:
        self.api.create_branch(**self._repository, branch=self.branch, revision=self.parent, exist_ok=True)

    def _commit(self, message: str) -> tuple[str, str | None]:
        """Create the commit and return its id, and the URL of the pull request if there is one."""
        files = self.contents.files.values()
        deletions = [CommitOperationDelete(path, False) for path in self.stale]
        sources = {file.path: str(file.source) if isinstance(file.source, Path) else file.source for file in files}
        commit = self.api.create_commit(
            **self._repository,
            operations=[*(CommitOperationAdd(path, source) for path, source in sources.items()), *deletions],
            commit_message=message,
            revision=None if self.create_pr else self.branch,
            parent_commit=self.parent,
            create_pr=self.create_pr,
        )
        return commit.oid, commit.pr_url

    def _find_lost_commit(self) -> tuple[str, str | None] | None:
        """Return the commit of an attempt that succeeded although its reply was lost; None if there is none."""
        if self.create_pr:
            return self._find_pull_request()
        head = self._list_heads().get(self.branch)
        if head is None or head == self.parent or not self._matches_contents(self._list_files(head)):
            return None
        return head, None

    def _find_pull_request(self) -> tuple[str, str] | None:
        """Return commit and URL of an open pull request with exactly these contents; None if there is none."""
        refs = self.api.list_repo_refs(**self._repository, include_pull_requests=True).pull_requests
        if not refs:
            return None
        opened = self.api.get_repo_discussions(
            **self._repository, discussion_type="pull_request", discussion_status="open"
        )
        numbers = {str(discussion.num) for discussion in opened}
        for ref in refs:
            number = ref.ref.rpartition("/")[2]
            if number in numbers and self._matches_contents(self._list_files(ref.target_commit)):
                return ref.target_commit, f"{self._url}/discussions/{number}"
        return None

    def _list_heads(self) -> dict[str, str]:
        return {ref.name: ref.target_commit for ref in self.api.list_repo_refs(**self._repository).branches}

    def _list_files(self, revision: str) -> dict[str, RepoFile]:
        tree = self.api.list_repo_tree(**self._repository, revision=revision, recursive=True)
        return {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}

    def _read(self, path: str) -> bytes:
        """Return the content of a file of the repository at the branch's head."""
        return Path(self.api.hf_hub_download(**self._repository, filename=path, revision=self.parent)).read_bytes()

    def _matches_contents(self, remote: dict[str, RepoFile]) -> bool:
        """Return whether remote files equal the contents, without stale files."""
        return not self.contents.find_stale(remote) and not find_differences(self.contents.files, remote)

    def _create_tag(self, commit: str | None) -> None:
        if self.tag is not None:
            settings: dict[str, Any] = {"tag": self.tag, "revision": commit, "exist_ok": True}
            self._attempt("tagging", partial(self.api.create_tag, **self._repository, **settings))

    def add_to_collection(self) -> str:
        """Add the repository to the collection, given by slug or title, and return the collection's URL."""
        slug = str(self.collection)
        if "/" not in slug:
            settings: dict[str, Any] = {"namespace": self.repo_id.partition("/")[0], "private": self.private}
            create = partial(self.api.create_collection, slug, **settings, exists_ok=True)
            slug = self._attempt("creating the collection", create).slug
        add = partial(self.api.add_collection_item, slug, self.repo_id, self.repo_type, exists_ok=True)
        return self._attempt("adding to the collection", add).url

    @property
    def _repository(self) -> dict[str, Any]:
        """Return the arguments that identify the repository in calls of `HfApi`."""
        return {"repo_id": self.repo_id, "repo_type": self.repo_type}

    @property
    def _url(self) -> str:
        return f"{self.api.endpoint}/{'spaces/' if self.sdk else ''}{self.repo_id}"

    def _make_result(self, commit: str | None, changed: bool = True, pull_request: str | None = None) -> PushResult:
        url = self._url + (f"/tree/{commit}" if commit else "")
        files = {file.path: file.size for file in self.contents.files.values()}
        return PushResult(self.repo_id, commit, url, files, self.stale, self.contents.skipped, changed, pull_request)

    def _attempt(
        self, action_name: str, action: Callable[[], Any], find_lost_result: Callable[[], Any] = lambda: None
    ) -> Any:
        """Run an action on the Hub with retries; if it fails, the error also states whether the branch was changed."""
        try:
            return retry(action, action_name, report=self.report, find_lost_result=find_lost_result)
        except UserError as error:
            raise UserError(f"{error}. {self._describe_state()}") from error
        except Exception as error:
            if find_status(error) == 412:
                problem = f"someone else changed {self.branch} of {self.repo_id} meanwhile, so nothing was pushed"
                raise UserError(f"{problem}; review the change, then run the same command again") from error
            explanation = self._explain_size(error)
            explanation = explanation or explain_hub_error(error, self.repo_id, explicit_token=self.has_token)
            raise UserError(f"{action_name} failed: {explanation}. {self._describe_state()}") from error

    def _explain_size(self, error: Exception) -> str | None:
        """Return an explanation of a failure due to file size, naming the file; None for other failures."""
        by_size = sorted(self.contents.files.values(), key=lambda file: file.size, reverse=True)
        response = find_response(error)
        if response is not None and response.status_code == 413 and "/commit/" in str(response.url):
            texts = [file for file in by_size if file.is_text]  # they are sent inside the commit
            return (
                f"the {len(texts)} text files ({sum(file.size for file in texts):,} bytes together, most of them in "
                f"{texts[0].path}) are more than the Hub accepts in one commit; make {texts[0].path} smaller"
            )
        stored_files = [file for file in by_size if not file.is_text]
        named_files = [file for file in stored_files if file.sha256 in str(error)]
        if find_status(error) != 413 and not (named_files and "too large" in str(error).lower()):
            return None
        largest = (named_files or stored_files)[0]
        return f"{largest.path} ({largest.size:,} bytes) is larger than the Hub accepts; lower --max-shard-size"

    def _describe_state(self) -> str:
        """Return a sentence about the state of the branch after a failure."""
        retry_advice = "Run the same command again; uploaded files are kept"
        try:
            head = self._list_heads().get(self.branch)
        except Exception:  # the first failure is the one to report
            return f"Whether {self.branch} was changed is unknown. {retry_advice}"
        if head in (self.parent, None):
            return f"{self.branch} is unchanged. {retry_advice}"
        return f"{self.branch} was changed meanwhile, to {head[:8]}. {retry_advice}"
