"""Everything that can be wrong with a push, found out before anything is created."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from huggingface_hub import HfApi, RepoCard, get_token
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile, SpaceInfo
from huggingface_hub.utils import validate_repo_id

from hf_vit.errors import UserError
from hf_vit.repositories.failures import explain, login_help, token_source
from hf_vit.repositories.retrying import try_again

RepoType = Literal["model", "space"]
_BRANCH = re.compile(r"(?!refs/)(?!.*(\.\.|//|\.lock$|/$))[\w./+-]+")


@dataclass(frozen=True)
class PushOptions:
    """How to push; see `hf_vit.push_to_hub`."""

    private: bool = False
    revision: str | None = None
    create_pr: bool = False
    tag: str | None = None
    collection: str | None = None
    token: str | None = None
    space: bool = False

    @property
    def repo_type(self) -> RepoType:
        """As the Hub calls it."""
        return "space" if self.space else "model"

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


@dataclass(frozen=True)
class Destination:
    """Where a push goes, as it was found.

    Attributes:
        repo_id: user/name.
        user: whose token it is.
        exists: whether the repository does.
        head: commit of the branch that the new one is put on; None in a repository that is not there.
        branch: name of that branch.
        branch_exists: False: it will be made from main.
        files: path -> file of that commit.
        tags: name -> commit.
    """

    repo_id: str
    user: str
    exists: bool
    head: str | None
    branch: str
    branch_exists: bool
    files: dict[str, RepoFile]
    tags: dict[str, str]


def check_repo_id(repo_id: str) -> None:
    """Refuse what cannot be a repository's name: "user/name", or "name" for one's own.

    Raises:
        UserError: says what is wrong with it.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        reason = str(error).partition(": ")[0].split(" Use ")[0]
        raise UserError(
            f"'{repo_id}' cannot be the name of a repository ({reason}); give user/name of letters, digits, -, _ and ."
        ) from error


def log_in(api: HfApi, options: PushOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Who the token belongs to.

    Raises:
        UserError: there is none, it is invalid, or the Hub cannot be reached.
    """
    if (options.token or get_token()) is None:
        raise UserError(f"there is no token for the Hub: {login_help()}")
    try:
        return try_again(lambda: api.whoami(), "checking your account on the Hub", say=say)
    except Exception as error:
        raise explain(error, "the Hub", explicit_token=options.token is not None) from error


def find_destination(api: HfApi, repo_id: str, options: PushOptions, say: Callable[[str], None]) -> Destination:
    """Look at the repository and at the rights to it; nothing is changed.

    Raises:
        UserError: no right to write, a public repository where a private one was asked for, or the Hub fails.
    """
    check_repo_id(repo_id)
    me = log_in(api, options, say)
    repo_id = repo_id if "/" in repo_id else f"{me['name']}/{repo_id}"
    try:
        return try_again(lambda: _find_destination(api, repo_id, me, options), "reading the repository", say=say)
    except LocalTokenNotFoundError as error:
        raise UserError(f"there is no token for the Hub: {login_help()}") from error
    except Exception as error:
        raise explain(error, repo_id, explicit_token=options.token is not None) from error


def _find_destination(api: HfApi, repo_id: str, me: dict[str, Any], options: PushOptions) -> Destination:
    branch = options.revision or "main"
    try:
        info = api.repo_info(repo_id, repo_type=options.repo_type)
    except RepositoryNotFoundError:
        _check_namespace(repo_id, me, options)
        return Destination(repo_id, me["name"], False, None, branch, branch == "main", {}, {})
    if not options.create_pr:
        api.auth_check(repo_id, repo_type=options.repo_type, write=True)
    if isinstance(info, SpaceInfo) and info.sdk != "static":
        raise UserError(f"{repo_id} is a Space of the SDK {info.sdk}, and a page needs a static one; give another name")
    if options.private and not info.private:
        raise UserError(
            f"{repo_id} exists and is public, so --private cannot keep this push to yourself; make it private in its "
            "settings first, or give another name"
        )
    refs = api.list_repo_refs(repo_id, repo_type=options.repo_type)
    heads = {ref.name: ref.target_commit for ref in refs.branches}
    tags = {ref.name: ref.target_commit for ref in refs.tags}
    if branch in tags:
        raise UserError(f"{branch} is a tag of {repo_id}, and tags cannot be moved; push to a branch")
    head = heads.get(branch) or heads["main"]
    tree = api.list_repo_tree(repo_id, repo_type=options.repo_type, revision=head, recursive=True)
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    return Destination(repo_id, me["name"], True, head, branch, branch in heads, files, tags)


def _check_namespace(repo_id: str, me: dict[str, Any], options: PushOptions) -> None:
    """Whether the token may create this repository: the Hub says so only when asked to create it."""
    namespace, token = repo_id.split("/")[0], (me.get("auth") or {}).get("accessToken") or {}
    if options.create_pr:
        raise UserError(f"{repo_id} does not exist, so it cannot have pull requests; leave --create-pr out")
    where = token_source(options.token is not None)
    if token.get("role") == "read":
        raise UserError(f"{where} is read-only, and {repo_id} must be created; use a token with the role write")
    roles = {str(organisation["name"]): organisation.get("roleInOrg") for organisation in me.get("orgs") or []}
    if namespace != me["name"] and roles.get(namespace, "none") in ("none", "read"):
        raise UserError(
            f"{repo_id} does not exist or cannot be seen, and {where} (of {me['name']}) has no right to create it: "
            f"give {me['name']}/{repo_id.split('/')[1]}, or become a writing member of {namespace}"
        )


def check_card(card: str, repo_type: RepoType, say: Callable[[str], None]) -> None:
    """Let the Hub itself judge the card's metadata.

    Raises:
        UserError: what it says, field by field; or it cannot be asked.
    """
    try:
        try_again(lambda: RepoCard(card).validate(repo_type), "checking the card", say=say)
    except Exception as error:
        if type(error) is not ValueError:
            raise explain(error, "the Hub") from error
        messages = re.findall(r'"message":\s*"((?:[^"\\]|\\.)*)"', str(error))
        words = "; ".join(message.replace('\\"', '"') for message in messages) or str(error)
        raise UserError(f"the Hub would refuse the card's metadata: {words}") from error
