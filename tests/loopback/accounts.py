"""Routes: test control, accounts, cards, repositories and their references."""

import base64
import hashlib
import re
from typing import Any

from loopback.card_rules import card_errors, eval_results
from loopback.handler import ORGANISATIONS, Handler, route
from loopback.refusal import Refusal
from loopback.store import Store, git_oid, lfs_pointer


@route("GET|POST|DELETE", "/_test/(?P<what>faults|log|fsck|sizes|repo|plant|all)")
def control(request: Handler, what: str) -> None:
    hub = request.hub
    if what == "faults" and request.command == "POST":
        hub.faults.add(request.json())
    elif what == "faults" and request.command == "DELETE":
        hub.faults.clear()
    elif what == "all":
        hub.reset()
    elif what == "sizes":
        hub.sizes.update(request.json())
    elif what == "repo":  # settings that a person changes on the web page
        changes = request.json()
        repo = request.store.repos[changes.pop("id").lower()]
        repo.update(changes)
        request.store.save(repo)
    elif what == "plant":  # what no client could upload
        plant(request.store, **request.json())
    answers: dict[str, Any] = {"faults": hub.faults.active, "log": hub.log}
    request.reply(request.store.fsck() if what == "fsck" else answers.get(what))


def plant(store: Store, id: str, like: str | None, files: dict[str, str | None], large: list[str]) -> None:
    """A repository with files of any name (base64), beside those of another one; None takes one of these away."""
    tree: dict[str, Any] = {}
    if like is not None:
        source = store.repos[like.lower()]
        tree = store.tree(source, source["refs"]["refs/heads/main"])
    for path, content in files.items():
        tree.pop(path, None)
        if content is not None:
            data = base64.b64decode(content)
            sha256, size = store.put([data])
            oid = git_oid(lfs_pointer(sha256, size) if path in large else data)
            tree[path] = {"sha256": sha256, "size": size, "oid": oid, "lfs": path in large}
    repo = store.repos.get(id.lower()) or store.create(id, private=False, user=id.split("/")[0])
    repo["refs"]["refs/heads/main"] = store.new_commit(repo, None, tree, "planted", "somebody")
    store.save(repo)


@route("GET", "/api/whoami-v2")
def who_am_i(request: Handler) -> None:
    if request.user is None:
        raise Refusal(401, "Invalid username or password.")
    organisations = [
        {"type": "org", "id": name, "name": name, "fullname": name, "roleInOrg": members[request.user]}
        for name, members in ORGANISATIONS.items()
        if request.user in members
    ]
    token = {"displayName": "loopback", "role": request.role, "createdAt": "2026-01-01T00:00:00.000Z"}
    request.reply({"type": "user", "id": hashlib.md5(request.user.encode()).hexdigest()[:24], "name": request.user,
                   "fullname": request.user.title(), "isPro": False, "periodEnd": None, "avatarUrl": "",
                   "orgs": organisations, "auth": {"type": "access_token", "accessToken": token}})  # fmt: skip


@route("POST", "/api/validate-yaml")
def validate_card(request: Handler) -> None:
    asked = request.json()
    errors = card_errors(asked.get("content", ""), is_space=asked.get("repoType") == "space")
    request.reply({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)


@route("GET", "/api/agent-harnesses")
def agent_harnesses(request: Handler) -> None:
    request.reply({"standardEnvVars": [], "harnesses": {}})


@route("POST", "/api/repos/create")
def create_repo(request: Handler) -> None:
    asked = request.json()
    if request.user is None:
        raise Refusal(401, "Invalid username or password.")
    namespace, name = asked.get("organization") or request.user, asked.get("name") or ""
    if not re.fullmatch(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", name) or ".." in name or "--" in name:
        raise Refusal(400, f"Invalid repo name: {namespace}/{name}")
    if request.role != "write":
        raise Refusal(403, "Forbidden: you must use a write token to create a repository.")
    if not request.may(namespace, write=True):
        raise Refusal(403, f'You don\'t have the rights to create a model under the namespace "{namespace}"')
    is_space = asked.get("type") == "space"
    if is_space and asked.get("sdk") not in ("static", "gradio", "docker"):
        raise Refusal(400, "Invalid sdk of a Space")
    with request.store.lock:
        repo_id = f"{'spaces/' * is_space}{namespace}/{name}"
        existing = request.store.repos.get(repo_id.lower())
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        repo = existing or request.store.create(repo_id, private, request.user, asked.get("sdk"))
    body = {"url": f"{request.hub.endpoint}/{repo['id']}", "name": f"{namespace}/{name}", "id": repo["_id"]}
    if existing:  # the client reads "url" of the refusal when exist_ok=True
        raise Refusal(409, "You already created this model repo", body={"error": "You already created it", **body})
    request.reply(body)


@route("GET", "/api/models/{repo}/auth-check(?P<write>/write)?")
def check_rights(request: Handler, repo_id: str, write: str | None) -> None:
    request.repo(repo_id, "write" if write else "content")
    request.reply()


@route("GET", "/api/models/{repo}(?:/revision/(?P<revision>[^/]+))?")
def repo_info(request: Handler, repo_id: str, revision: str | None) -> None:
    repo = request.repo(repo_id)
    oid = request.store.resolve(repo, revision or "main")[1]
    request.reply(model_info(request, repo, oid))


def model_info(request: Handler, repo: dict[str, Any], oid: str) -> dict[str, Any]:
    """What is told of a model; `expand` adds its results."""
    commit = request.store.commit(repo, oid)
    assert commit is not None
    name = repo["id"].removeprefix("spaces/")
    answer = {"_id": repo["_id"], "id": name, "modelId": name, "author": name.split("/")[0],
              "sha": oid, "private": repo["private"], "gated": repo["gated"], "disabled": False, "downloads": 0,
              "likes": 0, "tags": [], "lastModified": commit["date"], "createdAt": repo["created"],
              "siblings": [{"rfilename": path} for path in sorted(commit["tree"])]}  # fmt: skip
    if repo["sdk"]:
        answer["sdk"] = repo["sdk"]
    if "evalResults" in request.query.get("expand", []):
        small = {path: entry for path, entry in commit["tree"].items() if not entry["lfs"]}
        files = {path: request.store.blob(entry["sha256"]).read_bytes() for path, entry in small.items()}
        answer["evalResults"] = eval_results(files)
    return answer


@route("GET", "/api/models/{repo}/refs")
def references(request: Handler, repo_id: str) -> None:
    repo = request.repo(repo_id)

    def under(prefix: str) -> list[dict[str, str]]:
        return [
            {"name": name.removeprefix(prefix), "ref": name, "targetCommit": oid}
            for name, oid in sorted(repo["refs"].items())
            if name.startswith(prefix)
        ]

    found = {"branches": under("refs/heads/"), "converts": [], "tags": under("refs/tags/")}
    if "include_prs" in request.query:
        found["pullRequests"] = under("refs/pr/")
    request.reply(found)


@route("GET", "/api/models/{repo}/discussions")
def discussions(request: Handler, repo_id: str) -> None:
    """The pull requests of a status, all of them on one page; `closed` in the settings lists those that are closed."""
    repo = request.repo(repo_id)
    wanted = request.query.get("status", ["open"])[0]
    numbers = range(1, repo["pull_requests"] + 1)
    answer = [
        {"title": "a change", "num": number, "status": wanted, "isPullRequest": True, "author": {"name": "somebody"},
         "createdAt": "2031-02-03T00:00:00.000Z",
         "repo": {"name": repo["id"].removeprefix("spaces/"), "type": "space" if repo["sdk"] else "model"}}
        for number in numbers
        if (number in repo.get("closed", [])) == (wanted == "closed")
    ]  # fmt: skip
    request.reply({"discussions": answer, "count": len(answer), "start": 0})


@route("POST", "/api/models/{repo}/(?P<kind>branch|tag)/(?P<revision>[^/]+)")
def create_reference(request: Handler, repo_id: str, kind: str, revision: str) -> None:
    repo, asked = request.repo(repo_id, "write"), request.json()
    name, start = (revision, asked.get("startingPoint") or "main") if kind == "branch" else (asked["tag"], revision)
    if not re.fullmatch(r"[\w./-]+", name) or ".." in name or name.startswith("refs/"):
        raise Refusal(400, f"Invalid reference for a {kind}: {name}")
    reference = f"refs/{'heads' if kind == 'branch' else 'tags'}/{name}"
    with request.store.lock:
        if reference in repo["refs"]:
            raise Refusal(409, f"Reference already exists: {reference}")
        repo["refs"][reference] = request.store.resolve(repo, start)[1]
        request.store.save(repo)
    request.reply()
