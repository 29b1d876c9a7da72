"""Routes: the models of a user, and collections."""

import contextlib
import re
import secrets
from typing import Any

import yaml

from loopback.accounts import model_info
from loopback.card_rules import metadata_of
from loopback.handler import Handler, route
from loopback.refusal import Refusal
from loopback.store import now


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
        metadata = metadata_of(request.store.blob(card["sha256"]).read_text()) if card else None
    fields = metadata if isinstance(metadata, dict) else {}
    answer["cardData"] = {name: value for name, value in fields.items() if name != "model-index"}
    answer["model-index"] = fields.get("model-index")
    return answer | repo.get("listed", {})  # what a test wants to be told of it


@route("POST", "/api/collections")
def create_collection(request: Handler) -> None:
    asked = request.json()
    title, namespace = str(asked["title"]), asked["namespace"]
    _check_write(request, namespace)
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
    _check_write(request, known["owner"])
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


def _check_write(request: Handler, namespace: str) -> None:
    if request.user is None:
        raise Refusal(401, "Invalid username or password.")
    if request.role != "write" or not request.may(namespace, write=True):
        raise Refusal(403, "You don't have the required permissions to perform this action.")
