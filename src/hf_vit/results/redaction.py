"""Remove secrets and local folders from everything that is recorded.

Redacted are values with a secret's name (`--hub_token X`, `api_key=X`), texts that match the pattern of a known token,
user, password and query of a URL, and the folders of local paths. Class names such as "/m/01g317" are not treated as
paths, as config.json publishes them anyway.
"""

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

REDACTED = "REDACTED"

# Token patterns that the services document.
_TOKEN_PATTERNS = {
    "a Hugging Face token": re.compile(r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    "a GitHub token": re.compile(r"(?<![A-Za-z0-9])(?:gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_\w{22,})"),
    "a GitLab token": re.compile(r"(?<![A-Za-z0-9])glpat-[\w-]{20,}"),
    "an OpenAI or Anthropic key": re.compile(r"(?<![A-Za-z0-9])sk-(?=[\w-]*\d)[\w-]{20,}"),
    "an AWS access key": re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])"),
    "a Google API key": re.compile(r"(?<![A-Za-z0-9])AIza[\w-]{35}"),
    "a Google token": re.compile(r"(?<![A-Za-z0-9])ya29\.[\w-]{20,}"),
    "a PyPI token": re.compile(r"(?<![A-Za-z0-9])pypi-AgE[\w-]{20,}"),
    "an npm token": re.compile(r"(?<![A-Za-z0-9])npm_[A-Za-z0-9]{36}"),
    "a Databricks token": re.compile(r"(?<![A-Za-z0-9])dapi[0-9a-f]{32}"),
    "a Slack token": re.compile(r"(?<![A-Za-z0-9])xox[abeprs]-[\w-]{10,}"),
    "a JSON web token": re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    "a private key": re.compile(
        r"-----BEGIN (?:\w+ )*PRIVATE KEY-----(?:.*?-----END (?:\w+ )*PRIVATE KEY-----)?", re.S
    ),
}
# "class token", "mask token" and so on name tokens of a model, not secrets.
_HARMLESS = "".join(
    rf"(?<!{word}[-_. ])" for word in ("class", "cls", "distillation", "dist", "register", "mask", "pad", "bos", "eos")
)
_SECRET_NAME = (
    r"(?:[A-Za-z0-9]+[-_.])*(?:pass(?:word|wd|phrase)|secrets?|credentials?|apikey|auth(?:orization)?|"
    r"(?:api|access|secret|private|signing|encryption|account|wandb|comet)[-_.]?key|"
    rf"{_HARMLESS}token)"
)
_SCHEME = r"(?:(?:basic|bearer|token)\s+)?"
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s,;&'\"]+)"
_NAMED_SECRETS = (
    re.compile(rf"(?<![\w.-])(--?{_SECRET_NAME}(?:=|\s+(?!-)){_SCHEME}){_VALUE}", re.I),
    re.compile(rf"(?<![\w.-])({_SECRET_NAME}(?:\s*=\s*|[\"']\s*:\s*){_SCHEME}){_VALUE}", re.I),
    re.compile(rf"(authorization:\s*{_SCHEME})[^\s'\"]+", re.I),
)
_SECRET_OPTION = re.compile(rf"--?{_SECRET_NAME}", re.I)

# Fields that hold lists of classes or dicts keyed by class. Text under `labels` may also be a path.
_CLASS_FIELDS = frozenset({"class_weights", "classes", "label_names", "labels", "per_class", "thresholds"})

# A URL: scheme, user and password, host and path, query, fragment.
_URL = re.compile(
    r"(?<![A-Za-z0-9])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:[^\s/'\"<>]*@)?(?P<rest>[^\s?#'\"<>]*)"
    r"(?:\?[^\s#'\"<>]*)?(?P<fragment>#[^\s'\"<>]*)?"
)
_FILE_URL = re.compile(r"\bfile:/+[^\s'\"<>]*", re.I)
# An absolute path in a longer text has at least two parts and is not the end of a URL, a fraction or a relative path.
_POSIX_PATH = re.compile(r"(?<![\w./~\-])~?/(?:[^\s/'\"`,;:=()]+/)+([^\s/'\"`,;:=()]*)")
_WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:[\\/](?:[^\s\\/'\"]+[\\/])*([^\s\\/'\"]*)")


def find_secret(text: str) -> str | None:
    """Return the kind of token that a text contains, such as "a GitHub token"; None if no known pattern matches.

    Text is also searched without zero bytes, in case it is UTF-16 that was decoded byte by byte.
    """
    variants = {text, text.replace("\0", "")}
    return next((kind for kind, pattern in _TOKEN_PATTERNS.items() if any(map(pattern.search, variants))), None)


def redact_text(text: str) -> str:
    """Return a text without secrets and with every absolute local path reduced to its last part.

    >>> redact_text("fetched https://ann:pw@host/x.npz?sig=1 into /home/ann/models/x.npz with --hub_token abc")
    'fetched https://host/x.npz into x.npz with --hub_token REDACTED'
    """
    text = _hide_secrets(text)
    text = _FILE_URL.sub(lambda match: _get_last_part(match[0]), text)
    parts: list[str] = []
    end = 0
    for match in _URL.finditer(text):
        is_local = match["rest"].startswith("/")  # there is no host
        url = _get_last_part(match["rest"]) if is_local else _strip_url(match)
        parts += [_hide_paths(text[end : match.start()]), url]
        end = match.end()
    return "".join([*parts, _hide_paths(text[end:])])


def redact_message(text: str) -> str:
    """Return a message for the user without secrets, as it may be logged; local paths stay.

    >>> redact_message("https://ann:pw@host/x.npz?sig=1 does not fit into /home/ann/models")
    'https://host/x.npz does not fit into /home/ann/models'
    """
    return _URL.sub(_strip_url, _hide_secrets(text))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line's arguments without secrets and with absolute paths and paths with ".." shortened.

    >>> redact_arguments(["--data", "../ann/cats", "--hub_token", "abc"])
    ['--data', 'cats', '--hub_token', 'REDACTED']
    """
    redacted: list[str] = []
    is_secret = False
    for argument in arguments:
        redacted.append(REDACTED if is_secret and not argument.startswith("-") else _redact_argument(argument))
        is_secret = _SECRET_OPTION.fullmatch(argument) is not None
    return redacted


def redact_command(command: str | Sequence[str]) -> str:
    """Return a command without secrets, with the program's base name and paths reduced to their last part.

    >>> redact_command(["/home/ann/.venv/bin/hf-vit", "finetune", "--data", "/data/ann/cats"])
    'hf-vit finetune --data cats'
    """
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError:  # unbalanced quotes: the line cannot be split into arguments
            return redact_text(command)
    if not command:
        return ""
    program, *arguments = command
    # PureWindowsPath splits on both separators, as the record may come from another system. NAME=VALUE may come first.
    name = program if "=" in program else PureWindowsPath(program).name.removesuffix(".exe")
    if name == "__main__.py" and PureWindowsPath(program).parent.name == "hf_vit":
        name = "hf-vit"
    head = ["python", *redact_arguments([program])] if name.endswith(".py") else redact_arguments([name])
    return shlex.join(head + redact_arguments(arguments))


def redact_values(value: "JsonValue") -> "JsonValue":
    """Return JSON with all texts and keys redacted; what holds text under a key that names a secret is replaced.

    Class names lose secrets but keep their paths. Keys that become equal are numbered, so that no value is lost.

    >>> redact_values({"/a/x": "/b/y", "/c/x": 1, "per_class": {"/animal/mouse": 0.5}})
    {'x': 'y', 'x (2)': 1, 'per_class': {'/animal/mouse': 0.5}}
    """
    return _redact_values(value, _redact_string)


def _redact_values(value: "JsonValue", redact_name: Callable[[str], str]) -> "JsonValue":
    """Return redacted JSON; `redact_name` is applied to keys and to the texts of lists at this level and below."""
    if isinstance(value, str):
        return _redact_string(value)
    if isinstance(value, list):
        return [redact_name(item) if isinstance(item, str) else _redact_values(item, redact_name) for item in value]
    if not isinstance(value, dict):
        return value
    new_keys = _redact_keys(value, redact_name)
    redacted: dict[str, JsonValue] = {}
    for key, item in value.items():
        if re.fullmatch(_SECRET_NAME, key, re.I):
            item = _hide_texts(item)
        # Names of classes may look like paths, which `redact_message` keeps.
        redacted[new_keys[key]] = _redact_values(item, redact_message if key in _CLASS_FIELDS else redact_name)
    return redacted


def _hide_texts(value: "JsonValue") -> "JsonValue":
    """Return JSON with all texts replaced; numbers and keys stay, as a class may have the name of a secret."""
    if isinstance(value, dict):
        return {key: _hide_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_texts(item) for item in value]
    return REDACTED if isinstance(value, str) else value


def _redact_keys(keys: Iterable[str], redact: Callable[[str], str]) -> dict[str, str]:
    """Map each key to its redacted form, made unique by a number."""
    redacted = {key: redact(key) for key in keys}
    used_names = {key for key, plain in redacted.items() if key == plain}
    for key, plain in redacted.items():
        number = 1
        name = plain
        while key != plain and name in used_names:
            number += 1
            name = f"{plain} ({number})"
        redacted[key] = name
        used_names.add(name)
    return redacted


@functools.lru_cache(maxsize=4096)  # every record that is added redacts those before it again
def _redact_string(text: str) -> str:
    """Return redacted text; if the whole text is an absolute path, possibly with spaces, only its last part is kept."""
    return redact_text(_get_last_part(text) if PurePosixPath(text).is_absolute() else text)


def _hide_secrets(text: str) -> str:
    """Return a text with tokens, and values of options or fields with a secret's name, replaced."""
    for pattern in _TOKEN_PATTERNS.values():
        text = pattern.sub(REDACTED, text)
    for pattern in _NAMED_SECRETS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def _redact_argument(argument: str) -> str:
    """Return one command line argument without secrets and with its path reduced to the last part."""
    match = re.fullmatch(r"(-\w(?=[/~])|-[^=]*|)(=?)(.*)", argument, re.DOTALL)  # -o/home/ann/x, --output=/home/ann/x
    assert match is not None
    option, equals, value = match.groups()
    if option and _SECRET_OPTION.fullmatch(option):
        return option + equals + (REDACTED if equals else "")
    posix, windows = PurePosixPath(value), PureWindowsPath(value)
    name = ""
    if len(windows.drive) == 2:  # "C:", not a host
        name = windows.name
    elif "://" not in value and (posix.is_absolute() or ".." in posix.parts or value.startswith("~")):
        name = posix.name
    return option + equals + redact_text(name or value)


def _strip_url(match: re.Match[str]) -> str:
    """Return scheme, host, path and harmless fragment of a URL."""
    fragment = match["fragment"] or ""
    return f"{match['scheme']}://{match['rest']}{'' if '=' in fragment else fragment}"


def _hide_paths(text: str) -> str:
    """Reduce POSIX and Windows paths in a text to their last part."""
    return _POSIX_PATH.sub(r"\1", _WINDOWS_PATH.sub(r"\1", text))


def _get_last_part(path: str) -> str:
    """Return the last part of a path, or the path itself if it has none."""
    return PurePosixPath(path).name or path
