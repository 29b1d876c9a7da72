"""The Hub's routes: test control, accounts, repositories, uploads, downloads, collections, and rules for cards."""

import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import re
import secrets
from typing import Any
from urllib.parse import parse_qs, quote

import yaml

from loopback.handler import ORGANISATIONS, Handler, route
from loopback.store import LFS_SUFFIXES, Refusal, Store, git_oid, lfs_pointer, now

# Rules for a card's metadata: the main ones, and the commonest licenses

_FRONT = re.compile(r"^\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(\r?\n|$)", re.DOTALL)
_REPO_ID = r"(https?://\S+)|([A-Za-z0-9][\w.-]*(/[\w.-]+)?)"
_LICENSES = ["apache-2.0", "mit", "bsd-3-clause", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "gpl-3.0", "unknown", "other"]


def make_metadata(card: str) -> Any:
    """The metadata as parsed, None without any; raises yaml.YAMLError."""
    found = _FRONT.match(card)
    return yaml.safe_load(found[1]) if found else None


def card_errors(card: str, is_space: bool = False) -> list[str]:
    """What the Hub would refuse the card for."""
    try:
        metadata = make_metadata(card)
    except yaml.YAMLError as error:
        return [f"Invalid YAML: {error}"]
    if metadata is None:
        return []
    if not isinstance(metadata, dict):
        return ['"metadata" must be an object']
    errors = ['"sdk" is required'] if is_space and metadata.get("sdk") not in ("static", "gradio", "docker") else []
    for field in ("license", "tags", "datasets", "base_model", "language", "pipeline_tag", "library_name"):
        values = metadata.get(field, [])
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, str):
                errors.append(f'"{field}" must be a string')
            elif field == "license" and value not in _LICENSES:
                errors.append(f'"license" must be one of [{", ".join(_LICENSES)}]')
            elif field in ("datasets", "base_model") and not re.fullmatch(_REPO_ID, value):
                errors.append(f'"{field}" with value "{value}" is not valid.')
    try:
        for entry in metadata.get("model-index", []):
            results = [result for result in entry["results"] if entry["name"]]
            for result in results:
                wanted = [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"]]
                metrics = [metric["type"] for metric in result["metrics"] if metric["value"] is not None]
                if not all(wanted) or not metrics:
                    raise ValueError("a result names no task, data or metric")
    except (KeyError, TypeError, ValueError) as error:
        errors.append(f'"model-index" is not valid: {error}')
    return errors


def eval_results(files: dict[str, bytes]) -> list[dict[str, Any]]:
    """`.eval_results/*.yaml` as the Hub reads them (hub-docs, eval-results.md): an entry each, or what is wrong."""
    answers: list[dict[str, Any]] = []
    for name, data in sorted(files.items()):
        if not re.fullmatch(r"\.eval_results/[^/]+\.ya?ml", name):
            continue
        try:
            for entry in yaml.safe_load(data):
                if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", entry["dataset"]["id"]) or not entry["dataset"]["task_id"]:
                    raise ValueError("dataset.id is no data set")
                if not isinstance(entry["value"], float | int):
                    raise ValueError("value is no number")
                if "source" in entry and not entry["source"].get("url"):
                    raise ValueError("source.url is required")
                answers.append({"filename": name, "data": entry})
        except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            answers.append({"filename": name, "error": str(error)})
    return answers


# Accounts and repositories


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
        request.store.repos[changes.pop("id").lower()].update(changes)
    elif what == "plant":  # what no client could upload
        plant(request.store, **request.json())
    answers: dict[str, Any] = {"faults": hub.faults.active, "log": hub.log}
    request.reply(request.store.fsck() if what == "fsck" else answers.get(what))


def plant(store: Store, id: str, like: str | None, files: dict[str, str | None], large: list[str]) -> None:
    """A repository with files of any name (base64), beside those of another one; None takes one of these away."""
    tree: dict[str, Any] = {}
    if like is not None:
        source = store.repos[like.lower()]
        tree |= store.tree(source, source["refs"]["refs/heads/main"])
    for path, content in files.items():
        tree.pop(path, None)
        if content is not None:
            data = base64.b64decode(content)
            sha256, size = store.put([data])
            oid = git_oid(lfs_pointer(sha256, size) if path in large else data)
            tree[path] = {"sha256": sha256, "size": size, "oid": oid, "lfs": path in large}
    repo = store.repos.get(id.lower()) or store.create(id, private=False)
    repo["refs"]["refs/heads/main"] = store.new_commit(repo, tree)


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
        repo = existing or request.store.create(repo_id, private, asked.get("sdk"))
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
    commit = repo["commits"][oid]
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
    request.reply()


# Lists of models, and collections


@route("GET", "/api/models")
def list_models(request: Handler) -> None:
    """Of an author, as far as the asker may see them, a few on a page; `expand` adds what a card and files tell."""
    author, start = request.query.get("author", [""])[0], int(request.query.get("cursor", ["0"])[0])
    repos = [repo for repo in request.store.repos.values() if repo["id"].split("/")[0] == author]
    seen = [repo for repo in repos if not repo["private"] or request.may(author)]
    page, following = seen[start : start + 2], start + 2
    headers = {}
    if following < len(seen):
        address = re.sub(r"[?&]cursor=\d+", "", request.path)
        headers["Link"] = f'<{request.hub.endpoint}{address}&cursor={following}>; rel="next"'
    request.reply([_listed(request, repo) for repo in page], headers=headers)


def _listed(request: Handler, repo: dict[str, Any]) -> dict[str, Any]:
    oid = request.store.resolve(repo, "main")[1]
    answer = model_info(request, repo, oid)
    card = request.store.tree(repo, oid).get("README.md")
    metadata = None
    with contextlib.suppress(yaml.YAMLError, UnicodeDecodeError):
        metadata = make_metadata(request.store.blob(card["sha256"]).read_text()) if card else None
    fields = metadata if isinstance(metadata, dict) else {}
    answer["cardData"] = {name: value for name, value in fields.items() if name != "model-index"}
    answer["model-index"] = fields.get("model-index")
    return answer | repo.get("listed", {})  # what a test wants to be told of it


@route("POST", "/api/collections")
def create_collection(request: Handler) -> None:
    asked = request.json()
    title, namespace = str(asked["title"]), asked["namespace"]
    request.check_write(namespace)
    with request.store.lock:
        for known in request.store.collections.values():
            if (known["owner"], known["title"]) == (namespace, title):
                body = {"error": "This collection already exists", "slug": known["slug"]}
                raise Refusal(409, "This collection already exists", body=body)
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
        slug = f"{namespace}/{plain}-{secrets.token_hex(12)}"
        made = {"slug": slug, "title": title, "owner": namespace, "items": [], "lastUpdated": now(), "position": 0,
                "private": bool(asked.get("private")), "theme": "green", "upvotes": 0}  # fmt: skip
        request.store.collections[slug] = made
    request.reply(made)


@route("GET", "/api/collections/(?P<slug>[^/]+/[^/]+)")
def collection(request: Handler, slug: str) -> None:
    request.reply(_known(request, slug))


@route("POST", "/api/collections/(?P<slug>[^/]+/[^/]+)/items")
def add_item(request: Handler, slug: str) -> None:
    known, item = _known(request, slug), request.json()["item"]
    request.check_write(known["owner"])
    request.repo(f"{'spaces/' * (item['type'] == 'space')}{item['id']}")
    with request.store.lock:
        if any((each["id"], each["type"]) == (item["id"], item["type"]) for each in known["items"]):
            raise Refusal(409, "Item already in collection")
        known["items"].append({"_id": secrets.token_hex(12), "position": len(known["items"]), **item})
    request.reply(known)


def _known(request: Handler, slug: str) -> dict[str, Any]:
    known = request.store.collections.get(slug)
    if known is None or (known["private"] and not request.may(known["owner"])):
        raise Refusal(404, "Collection not found")
    return known


# How files come in


def check_signature(request: Handler, text: str) -> None:
    if not hmac.compare_digest(request.query.get("sig", [""])[0], request.hub.sign(text)):
        raise Refusal(403, "SignatureDoesNotMatch")
    if request.headers.get("Authorization"):
        raise Refusal(400, "InvalidArgument: Only one auth mechanism allowed")


@route("POST", "/api/models/{repo}/preupload/(?P<revision>[^/]+)")
def upload_modes(request: Handler, repo_id: str, revision: str) -> None:
    proposal = "create_pr" in request.query and request.user is not None
    repo = request.repo(repo_id, "read" if proposal else "write")
    tree = request.store.tree(repo, request.store.resolve(repo, revision)[1])
    answers: list[dict[str, Any]] = []
    for file in request.json()["files"]:
        large = file["size"] >= request.hub.sizes["largest_regular"] or b"\0" in base64.b64decode(file["sample"])
        mode = "lfs" if large or file["path"].endswith(LFS_SUFFIXES) else "regular"
        answer = {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
        if entry := tree.get(file["path"]):
            answer["oid"] = entry["sha256"] if entry["lfs"] else entry["oid"]
        answers.append(answer)
    request.reply({"files": answers, "commitOid": request.store.resolve(repo, revision)[1]})


@route("POST", r"/{repo}\.git/info/lfs/objects/batch")
def lfs_batch(request: Handler, repo_id: str) -> None:
    asked = request.json()
    proposal = asked.get("ref") is None and request.user is not None
    repo = request.repo(repo_id, "read" if proposal else "write")
    answers: list[dict[str, Any]] = []
    for item in asked["objects"]:
        sha256, size = item["oid"], item["size"]
        answer: dict[str, Any] = {"oid": sha256, "size": size, "authenticated": True}
        if size > request.hub.sizes["largest_lfs"]:
            answer["error"] = {"code": 422, "message": f"File is too large: {size} bytes"}
        elif sha256 not in repo["uploaded"]:
            key = f"{repo['id']}/{sha256}/{size}"
            upload = f"{request.hub.storage}/lfs/{quote(key)}?sig={request.hub.sign(key)}"
            verify = f"{request.hub.endpoint}/api/lfs-verify/{repo['id']}"
            answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
        answers.append(answer)
    content = {"transfer": "basic", "objects": answers}
    request.reply(content, headers={"Content-Type": "application/vnd.git-lfs+json"})


@route("PUT", r"/lfs/(?P<key>.+)", storage=True)
def lfs_upload(request: Handler, key: str) -> None:
    check_signature(request, key)
    repo_id, sha256, size = key.rsplit("/", 2)
    request.store.put(request.chunks(), sha256, int(size))
    request.store.note_upload(repo_id, sha256)
    request.reply(b"", headers={"ETag": f'"{sha256}"'})


@route("POST", "/api/lfs-verify/{repo}")
def lfs_verify(request: Handler, repo_id: str) -> None:
    request.repo(repo_id)
    asked = request.json()
    path = request.store.blob(asked["oid"])
    if not path.exists() or path.stat().st_size != asked["size"]:
        raise Refusal(404, "LFS object not found, or of another size")
    request.reply()


@route("POST", "/api/models/{repo}/commit/(?P<revision>[^/]+)")
def commit(request: Handler, repo_id: str, revision: str) -> None:
    proposal = request.query.get("create_pr", ["0"])[0] in ("1", "true")
    if request.user is None:
        raise Refusal(401, "Invalid username or password.")
    repo = request.repo(repo_id, "read" if proposal else "write")
    header, operations = _read_operations(request.body())
    store = request.store
    with store.lock:
        reference, head = store.resolve(repo, revision)
        if reference is None or reference.startswith("refs/tags/"):
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        if header.get("parentCommit") and header["parentCommit"] != head:
            raise Refusal(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(store.tree(repo, head))
        for kind, value in operations:
            _apply(request, repo, tree, kind, value)
        oid = store.new_commit(repo, tree)
        url = f"{request.hub.endpoint}/{repo['id']}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        if proposal:
            repo["pull_requests"] += 1
            reference = f"refs/pr/{repo['pull_requests']}"
            answer["pullRequestUrl"] = f"{url}/discussions/{repo['pull_requests']}"
        repo["refs"][reference] = oid
    request.reply(answer)


def _read_operations(body: bytes) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    try:
        lines = [json.loads(line) for line in body.split(b"\n") if line.strip()]
        operations = [(line["key"], line["value"]) for line in lines]
    except (ValueError, KeyError) as error:
        raise Refusal(400, "Malformed ndjson payload") from error
    if not operations or operations[0][0] != "header" or not operations[0][1].get("summary"):
        raise Refusal(400, "Missing commit header, or an empty summary")
    return operations[0][1], operations[1:]


def _apply(request: Handler, repo: dict[str, Any], tree: dict[str, Any], kind: str, value: dict[str, Any]) -> None:
    path = value["path"]
    if not re.fullmatch(r"[^/]+(/[^/]+)*/?", path) or {".", "..", ".git"} & set(path.split("/")):
        raise Refusal(400, f"Invalid path in repo: {path}")
    if kind == "file":
        tree[path] = _regular_file(request, repo, path, value)
    elif kind == "lfsFile":
        sha256 = value["oid"]
        if sha256 not in repo["uploaded"] or not request.store.blob(sha256).exists():
            raise Refusal(400, f"an LFS pointer pointed to a file that does not exist. Offending file: - {path}")
        size = request.store.blob(sha256).stat().st_size
        tree[path] = {"sha256": sha256, "size": size, "oid": git_oid(lfs_pointer(sha256, size)), "lfs": True}
    elif kind == "deletedFile":
        if tree.pop(path, None) is None:
            raise Refusal(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
    else:
        raise Refusal(400, f"Unknown operation: {kind}")


def _regular_file(request: Handler, repo: dict[str, Any], path: str, value: dict[str, Any]) -> dict[str, Any]:
    try:
        data = base64.b64decode(value["content"], validate=True)
    except binascii.Error as error:
        raise Refusal(400, f"Invalid base64 content for {path}") from error
    limit = request.hub.sizes["largest_regular"]
    if len(data) > limit:
        raise Refusal(400, f"Your push was rejected: files larger than {limit} bytes. Offending files: - {path}")
    errors = card_errors(data.decode("utf-8", "replace"), bool(repo["sdk"])) if path == "README.md" else []
    if errors:
        raise Refusal(400, "Invalid metadata in README.md: " + "; ".join(errors))
    sha256, size = request.store.put([data])
    return {"sha256": sha256, "size": size, "oid": git_oid(data), "lfs": False}


# How files go out


def describe(request: Handler, path: str, entry: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": "file", "oid": entry["oid"], "size": entry["size"], "path": path}
    if entry["lfs"]:
        sha256, size = entry["sha256"], entry["size"]
        answer["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(lfs_pointer(sha256, size))}
        if xet_hash := request.store.xet["of_sha256"].get(sha256):
            answer["xetHash"] = xet_hash
    return answer


@route("GET", "/api/models/{repo}/tree/(?P<revision>[^/]+)(?:/(?P<within>.+))?")
def tree(request: Handler, repo_id: str, revision: str, within: str | None) -> None:
    repo = request.repo(repo_id)
    oid = request.store.resolve(repo, revision)[1]
    recursive = request.query.get("recursive", ["false"])[0].lower() in ("true", "1")
    above = f"{within}/" if within else ""
    found: dict[str, Any] = {}
    for path, entry in request.store.tree(repo, oid).items():
        if not path.startswith(above):
            continue
        parts = path.removeprefix(above).split("/")
        for depth in range(1, len(parts) if recursive else min(2, len(parts))):
            folder = above + "/".join(parts[:depth])
            folder_oid = hashlib.sha1((oid + folder).encode()).hexdigest()
            found[folder] = {"type": "directory", "oid": folder_oid, "size": 0, "path": folder}
        if recursive or len(parts) == 1:
            found[path] = describe(request, path, entry)
    if within and not found:
        raise Refusal(404, "Entry not found", "EntryNotFound")
    request.reply([found[path] for path in sorted(found)], headers={"X-Repo-Commit": oid})


@route("POST", "/api/models/{repo}/paths-info/(?P<revision>[^/]+)")
def paths_info(request: Handler, repo_id: str, revision: str) -> None:
    repo = request.repo(repo_id)
    found = request.store.tree(repo, request.store.resolve(repo, revision)[1])
    raw = request.body()
    asked = json.loads(raw)["paths"] if raw[:1] == b"{" else parse_qs(raw.decode()).get("paths", [])
    request.reply([describe(request, path, found[path]) for path in asked if path in found])


@route("GET|HEAD", "/{repo}/(?:resolve|raw)/(?P<revision>[^/]+)/(?P<path>.+)")
def resolve(request: Handler, repo_id: str, revision: str, path: str) -> None:
    repo = request.repo(repo_id, "content")
    oid = request.store.resolve(repo, revision)[1]
    headers: dict[str, Any] = {"X-Repo-Commit": oid}
    entry = request.store.tree(repo, oid).get(path)
    if entry is None:
        raise Refusal(404, "Entry not found", "EntryNotFound", headers=headers)
    sha256 = entry["sha256"]
    if not entry["lfs"]:
        headers |= {"ETag": f'"{entry["oid"]}"', "Content-Type": "text/plain; charset=utf-8"}
        return request.reply_file(request.store.blob(sha256), headers)
    headers |= {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": entry["size"], "Content-Type": "text/plain"}
    if xet_hash := request.store.xet["of_sha256"].get(sha256):
        token = f"{request.hub.endpoint}/api/models/{repo['id']}/xet-read-token/{oid}"
        headers |= {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": token, "Link": f'<{token}>; rel="xet-auth"'}
    location = f"{request.hub.storage}/get/{sha256}?sig={request.hub.sign('get/' + sha256)}"
    return request.reply(b"Found", 302, {**headers, "Location": location})


@route("GET|HEAD", "/get/(?P<sha256>[0-9a-f]{64})", storage=True)
def stored_file(request: Handler, sha256: str) -> None:
    check_signature(request, "get/" + sha256)
    request.reply_file(request.store.blob(sha256), {"ETag": f'"{sha256}"'})
