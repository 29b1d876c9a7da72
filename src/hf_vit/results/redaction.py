"""What must not be recorded: secrets, and where things lie on this machine. All that is recorded goes through here.

Redacted are values whose name says that they are secret (`--hub_token X`, `api_key=X`), texts with the pattern of a
known token, user, password and query of an address, and the folders of local paths. Names of classes are no paths
("/m/01g317"): config.json tells them everybody.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

REDACTED = "REDACTED"

# Patterns that the services document for their tokens; nothing else looks like them.
_TOKEN_PATTERNS = {
    "a Hugging Face token": re.compile(r"(?<![A-Za-z0-9])(?:hf|api_org)_[A-Za-z0-9]{20,}"),
    "a GitHub token": re.compile(r"(?<![A-Za-z0-9])(?:gh[oprsu]_[A-Za-z0-9]{36,}|github_pat_\w{22,})"),
    "a GitLab token": re.compile(r"(?<![A-Za-z0-9])glpat-[\w-]{20,}"),
    "an OpenAI or Anthropic key": re.compile(r"(?<![A-Za-z0-9])sk-(?=[\w-]*\d)[\w-]{20,}"),
    "an AWS access key": re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])"),
    "a Google API key": re.compile(r"(?<![A-Za-z0-9])AIza[\w-]{35}"),
    "a Slack token": re.compile(r"(?<![A-Za-z0-9])xox[abeprs]-[\w-]{10,}"),
    "a JSON web token": re.compile(r"(?<![A-Za-z0-9])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    "a private key": re.compile(
        r"-----BEGIN (?:\w+ )*PRIVATE KEY-----(?:.*?-----END (?:\w+ )*PRIVATE KEY-----)?", re.S
    ),
}
# Tokens of a model are no secrets.
_HARMLESS = "".join(
    rf"(?<!{word}[-_. ])" for word in ("class", "cls", "distillation", "dist", "register", "mask", "pad", "bos", "eos")
)
_SECRET_NAME = (
    r"(?:[A-Za-z0-9]+[-_.])*(?:pass(?:word|wd|phrase)|secrets?|credentials?|apikey|auth|"
    r"(?:api|access|secret|private|signing|encryption|account|wandb|comet)[-_.]?key|"
    rf"{_HARMLESS}token)"
)
_VALUE = r"(?:'[^']*'|\"[^\"]*\"|[^\s,;&'\"]+)"
_NAMED_SECRETS = (
    re.compile(rf"(?<![\w.-])(--?{_SECRET_NAME}(?:=|\s+(?!-))){_VALUE}", re.I),
    re.compile(rf"(?<![\w.-])({_SECRET_NAME}(?:\s*=\s*|[\"']\s*:\s*)){_VALUE}", re.I),
    re.compile(r"(authorization:\s*(?:(?:basic|bearer|token)\s+)?)[^\s'\"]+", re.I),
)
_SECRET_OPTION = re.compile(rf"--?{_SECRET_NAME}", re.I)

# Fields of tables whose keys are classes, and of lists of classes; a text under one of them may be a path (`labels`).
_OF_CLASSES = frozenset({"class_weights", "classes", "label_names", "labels", "per_class", "thresholds"})

# Scheme, user and password, host and path, query, fragment.
_ADDRESS = re.compile(
    r"(?<![A-Za-z0-9])(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?:[^\s/'\"<>]*@)?(?P<rest>[^\s?#'\"<>]*)"
    r"(?:\?[^\s#'\"<>]*)?(?P<fragment>#[^\s'\"<>]*)?"
)
_FILE_ADDRESS = re.compile(r"\bfile:/+[^\s'\"<>]*", re.I)
# An absolute path inside a longer text: at least two parts, not the tail of an address, a fraction or a relative path.
_POSIX_PATH = re.compile(r"(?<![\w./~\-])~?/(?:[^\s/'\"`,;:=()]+/)+([^\s/'\"`,;:=()]*)")
_WINDOWS_PATH = re.compile(r"(?<!\w)[A-Za-z]:[\\/](?:[^\s\\/'\"]+[\\/])*([^\s\\/'\"]*)")


def secret_in(text: str) -> str | None:
    """Return what kind of token a text holds, "a GitHub token"; None where no known pattern is in it.

    Text of two bytes a sign (UTF-16) that was read byte by byte is looked through as well.
    """
    readings = (text, text.replace("\0", ""))
    return next((kind for kind, pattern in _TOKEN_PATTERNS.items() if any(map(pattern.search, readings))), None)


def redact_text(text: str) -> str:
    """Return a text without secrets, and with every absolute local path reduced to its last part.

    >>> redact_text("fetched https://ann:pw@host/x.npz?sig=1 into /home/ann/models/x.npz with --hub_token abc")
    'fetched https://host/x.npz into x.npz with --hub_token REDACTED'
    """
    text = _hide_secrets(text)
    text = _FILE_ADDRESS.sub(lambda found: _last_part(found[0]), text)
    parts: list[str] = []
    end = 0
    for found in _ADDRESS.finditer(text):
        parts += [_hide_paths(text[end : found.start()]), _plain_address(found)]
        end = found.end()
    return "".join([*parts, _hide_paths(text[end:])])


def redact_message(text: str) -> str:
    """Return what is told to the user alone, but may be kept in a log: without secrets; places on this machine stay.

    >>> redact_message("https://ann:pw@host/x.npz?sig=1 does not fit into /home/ann/models")
    'https://host/x.npz does not fit into /home/ann/models'
    """
    return _ADDRESS.sub(_without_secrets, _hide_secrets(text))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Arguments of a command line, `--option value` and `--option=value`; relative paths that lead up as well.

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
    """Return the command as another person would type it: the program's plain name, no secrets, paths as their last
    part.

    >>> redact_command(["/home/ann/.venv/bin/hf-vit", "finetune", "--data", "/data/ann/cats"])
    'hf-vit finetune --data cats'
    """
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError:  # unbalanced quotes: no list of arguments to be had
            return redact_text(command)
    if not command:
        return ""
    program, *arguments = command
    # Split on both separators: a file written on one system is read on another.
    name = PureWindowsPath(program).name.removesuffix(".exe")
    if name == "__main__.py" and PureWindowsPath(program).parent.name == "hf_vit":
        name = "hf-vit"
    head = ["python", *redact_arguments([program])] if name.endswith(".py") else [name]
    return shlex.join(head + redact_arguments(arguments))


def redact_values(value: "JsonValue") -> "JsonValue":
    """JSON with all its texts and keys redacted, and the texts under a key that names a secret.

    Names of classes lose secrets alone. Keys that would become one are numbered, so that no value is lost.

    >>> redact_values({"/a/x": "/b/y", "/c/x": 1, "per_class": {"/animal/mouse": 0.5}})
    {'x': 'y', 'x (2)': 1, 'per_class': {'/animal/mouse': 0.5}}
    """
    return _redact_values(value, _redact_whole)


def _redact_values(value: "JsonValue", redact_name: Callable[[str], str]) -> "JsonValue":
    """`redact_name`: what becomes of keys and of the texts of lists, here and below."""
    if isinstance(value, str):
        return _redact_whole(value)
    if isinstance(value, list):
        return [redact_name(item) if isinstance(item, str) else _redact_values(item, redact_name) for item in value]
    if isinstance(value, dict):
        shown = _redact_keys(value, redact_name)
        return {
            shown[key]: REDACTED
            if isinstance(item, str) and re.fullmatch(_SECRET_NAME, key, re.I)
            else _redact_values(item, redact_message if key in _OF_CLASSES else redact_name)
            for key, item in value.items()
        }
    return value


def _redact_keys(keys: Iterable[str], redact: Callable[[str], str]) -> dict[str, str]:
    """Key -> what is recorded of it, which is no other key's."""
    redacted = {key: redact(key) for key in keys}
    taken = {key for key, plain in redacted.items() if key == plain}
    for key, plain in redacted.items():
        number, name = 1, plain
        while key != plain and name in taken:
            number += 1
            name = f"{plain} ({number})"
        redacted[key] = name
        taken.add(name)
    return redacted


def _redact_whole(text: str) -> str:
    """Return the last part of a text that is a path as a whole, even with spaces."""
    return redact_text(_last_part(text) if PurePosixPath(text).is_absolute() else text)


def _hide_secrets(text: str) -> str:
    """Return a text without tokens and without values of secret names."""
    for pattern in _TOKEN_PATTERNS.values():
        text = pattern.sub(REDACTED, text)
    for pattern in _NAMED_SECRETS:
        text = pattern.sub(rf"\1{REDACTED}", text)
    return text


def _redact_argument(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    if option and _SECRET_OPTION.fullmatch(option):
        return option + equals + (REDACTED if equals else "")
    posix, windows = PurePosixPath(value), PureWindowsPath(value)
    if windows.drive and len(windows.drive) == 2:
        value = windows.name or value
    elif "://" not in value and (posix.is_absolute() or ".." in posix.parts or value.startswith("~")):
        value = posix.name or value
    return option + equals + redact_text(value)


def _plain_address(found: re.Match[str]) -> str:
    if found["rest"].startswith("/"):  # no host: a place on this machine
        return _last_part(found["rest"])
    return _without_secrets(found)


def _without_secrets(found: re.Match[str]) -> str:
    """Scheme, host and path of an address."""
    fragment = found["fragment"] or ""
    return f"{found['scheme']}://{found['rest']}{'' if '=' in fragment else fragment}"


def _hide_paths(text: str) -> str:
    return _POSIX_PATH.sub(r"\1", _WINDOWS_PATH.sub(r"\1", text))


def _last_part(path: str) -> str:
    return PurePosixPath(path).name or path
