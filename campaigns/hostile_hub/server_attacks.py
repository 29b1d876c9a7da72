"""What a server may answer, to whoever reads a repository and to whoever pushes one."""

from collections.abc import Callable
from typing import Any

from campaigns.hostile_hub.attacks import WORDS, Attack, Make
from campaigns.hostile_hub.ground import Ground


def served(path: str, action: str, fields: Callable[[Ground], dict[str, Any]]) -> Make:
    return lambda ground, base: Attack(faults=((path, action, {"times": -1, **fields(ground)}),))


def redirected(path: str, place: Callable[[Ground], str], status: int = 302) -> Make:
    return served(path, "status", lambda ground: {"status": status, "headers": {"Location": place(ground)}})


def answered(path: str, body: Callable[[Ground], Any], status: int = 200) -> Make:
    return served(path, "status", lambda ground: {"status": status, "body": body(ground), "message": "x"})


_FILE = r"/resolve/"
_STORED = r"^/get/|^/xorb/"
SERVER_ATTACKS: dict[str, Make] = {
    "redirect: files elsewhere": redirected(_FILE, lambda ground: f"{ground.elsewhere}/x"),
    "redirect: files elsewhere, 307": redirected(_FILE, lambda ground: f"{ground.elsewhere}/x", 307),
    "redirect: the API elsewhere": redirected("/api/", lambda ground: f"{ground.elsewhere}/x"),
    "redirect: the API elsewhere, 308": redirected("/api/", lambda ground: f"{ground.elsewhere}/x", 308),
    "redirect: storage elsewhere": redirected(_STORED, lambda ground: f"{ground.elsewhere}/x"),
    "redirect: without scheme": redirected(_FILE, lambda ground: "//" + ground.elsewhere.partition("//")[2] + "/x"),
    "redirect: a file": redirected(_FILE, lambda ground: f"file://{ground.outside}/model.safetensors"),
    "redirect: a private address": redirected(_FILE, lambda ground: "http://169.254.169.254/latest/meta-data/"),
    "redirect: a loop": redirected(_FILE, lambda ground: "/mallory/hostile/resolve/main/config.json"),
    "redirect: nowhere": redirected(_FILE, lambda ground: ""),
    "redirect: words": redirected(_FILE, lambda ground: "http://a b\u00e9/"),
    "size: longer": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": 10**6}}),
    "size: shorter": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": 1}}),
    "size: nothing": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": 0}}),
    "size: huge": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": 10**18}}),
    "size: negative": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": -5}}),
    "size: no number": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Size": "x"}}),
    "length: longer": served(
        _STORED, "headers", lambda ground: {"headers": {"Content-Length": 10**6, "Connection": "close"}}
    ),
    "length: shorter": served(_STORED, "headers", lambda ground: {"headers": {"Content-Length": 10}}),
    "etag: above": served(
        _FILE,
        "headers",
        lambda ground: {"headers": {"ETag": '"../../../../evil"', "X-Linked-Etag": '"../../../../evil"'}},
    ),
    "etag: absolute": served(
        _FILE,
        "headers",
        lambda ground: {"headers": {"ETag": f'"{ground.outside}/x"', "X-Linked-Etag": f'"{ground.outside}/x"'}},
    ),
    "etag: nothing": served(_FILE, "headers", lambda ground: {"headers": {"ETag": "", "X-Linked-Etag": ""}}),
    "etag: wrong": served(_FILE, "headers", lambda ground: {"headers": {"X-Linked-Etag": '"' + "a" * 64 + '"'}}),
    "commit: above": served(_FILE, "headers", lambda ground: {"headers": {"X-Repo-Commit": "../../../../evil"}}),
    "commit: nothing": served(_FILE, "headers", lambda ground: {"headers": {"X-Repo-Commit": ""}}),
    "xet: another store": served(
        _FILE,
        "headers",
        lambda ground: {
            "headers": {
                "X-Xet-Refresh-Route": f"{ground.elsewhere}/token",
                "Link": f'<{ground.elsewhere}/t>; rel="xet-auth"',
            }
        },
    ),
    "damaged": served(_STORED, "corrupt_response", lambda ground: {}),
    "cut": served(_STORED, "cut_response", lambda ground: {"after": 100}),
    "gated": lambda ground, base: Attack(settings={"gated": True}),
    "private": lambda ground, base: Attack(settings={"private": True}),
    "answer: 401": served(
        "mallory", "status", lambda ground: {"status": 401, "message": WORDS.replace("\u202e", "")[:40]}
    ),
    "answer: 403 with words": served(
        "mallory", "status", lambda ground: {"status": 403, "message": "\x1b[31mx\x07" * 9}
    ),
    "answer: 404": served("mallory", "status", lambda ground: {"status": 404}),
    "answer: 418 with a page": served("mallory", "status", lambda ground: {"status": 418, "message": "<html>" * 3000}),
    "answer: lists": served("/api/", "status", lambda ground: {"status": 200, "body": []}),
    "answer: nothing": served("/api/", "status", lambda ground: {"status": 200, "body": {}}),
    "answer: words": served(
        "/api/",
        "status",
        lambda ground: {
            "status": 200,
            "body": {"sha": "../../../evil", "id": WORDS, "siblings": [{"rfilename": "../../evil"}], "gated": WORDS},
        },
    ),
}


# What a server may answer to a push.
PUSH_ATTACKS: dict[str, Make] = {
    "honest": lambda ground, base: Attack(),
    "who: words": answered("/whoami", lambda ground: {"type": "user", "name": WORDS, "orgs": WORDS, "auth": WORDS}),
    "who: nothing": answered("/whoami", lambda ground: {}),
    "who: a list": answered("/whoami", lambda ground: []),
    "who: elsewhere": redirected("/whoami", lambda ground: f"{ground.elsewhere}/who"),
    "card: elsewhere": redirected("/validate-yaml", lambda ground: f"{ground.elsewhere}/card", 308),
    "card: words": answered("/validate-yaml", lambda ground: {"errors": [{"message": WORDS}]}, 400),
    "card: a list": answered("/validate-yaml", lambda ground: [WORDS], 400),
    "create: elsewhere": redirected("/repos/create", lambda ground: f"{ground.elsewhere}/create", 307),
    "create: words": answered("/repos/create", lambda ground: {"url": WORDS}),
    "create: nothing": answered("/repos/create", lambda ground: {}),
    "preupload: elsewhere": redirected("/preupload/", lambda ground: f"{ground.elsewhere}/pre", 307),
    "preupload: nothing": answered("/preupload/", lambda ground: {"files": []}),
    "preupload: words": answered(
        "/preupload/", lambda ground: {"files": [{"path": "../x", "uploadMode": WORDS, "shouldIgnore": True}]}
    ),
    "batch: elsewhere": answered(
        "/info/lfs/",
        lambda ground: {
            "transfer": "basic",
            "objects": [
                {
                    "oid": "a" * 64,
                    "size": 1,
                    "actions": {
                        "upload": {"href": f"{ground.elsewhere}/up"},
                        "verify": {"href": f"{ground.elsewhere}/verify"},
                    },
                }
            ],
        },
    ),
    "batch: a file": answered(
        "/info/lfs/",
        lambda ground: {
            "transfer": "basic",
            "objects": [{"oid": "a" * 64, "size": 1, "actions": {"upload": {"href": f"file://{ground.outside}/x"}}}],
        },
    ),
    "batch: nothing": answered("/info/lfs/", lambda ground: {}),
    "batch: words": answered("/info/lfs/", lambda ground: {"objects": [{"error": {"code": 1, "message": WORDS}}]}),
    "xet: elsewhere": served(
        "/xet-write-token/",
        "status",
        lambda ground: {
            "status": 200,
            "body": {"accessToken": "t", "casUrl": ground.elsewhere, "exp": 4 * 10**9},
            "headers": {
                "X-Xet-Cas-Url": ground.elsewhere,
                "X-Xet-Access-Token": "t",
                "X-Xet-Token-Expiration": 4 * 10**9,
            },
        },
    ),
    "xet: nothing": answered("/xet-write-token/", lambda ground: {}),
    "storage: elsewhere": redirected("^/lfs/|^/xet/", lambda ground: f"{ground.elsewhere}/store", 307),
    "commit: elsewhere": redirected("/commit/", lambda ground: f"{ground.elsewhere}/commit", 307),
    "commit: words": answered("/commit/", lambda ground: {"commitOid": WORDS, "commitUrl": WORDS, "success": True}),
    "commit: nothing": answered("/commit/", lambda ground: {}),
    "commit: a page": answered("/commit/", lambda ground: "<html>" * 100),
    "tree: elsewhere": redirected("/tree/", lambda ground: f"{ground.elsewhere}/tree"),
    "tree: words": answered("/tree/", lambda ground: [{"type": "file", "path": "../x", "oid": WORDS, "size": -1}]),
    "refs: words": answered("/refs", lambda ground: {"branches": [], "tags": [], "converts": []}),
    "all: 500 with words": answered("/api/", lambda ground: {"error": WORDS * 50}, 500),
    "all: 401": answered("/api/", lambda ground: {"error": WORDS}, 401),
    "all: 403": answered("/api/", lambda ground: {"error": WORDS}, 403),
    "all: 426": answered("/api/", lambda ground: {"error": WORDS}, 426),
}
