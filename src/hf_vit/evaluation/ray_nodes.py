"""What the processes of Ray have in common: where they work, that nodes are alike, and how they fail in one line."""

import os
import re
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from hf_vit.environment import versions
from hf_vit.errors import UserError, one_line

ATTEMPTS = 4  # at a part, a run, or at beginning
_COMPARED = ("hf-vit", "torch", "torchvision", "transformers")


def compared_versions() -> dict[str, str]:
    """Of the packages that compute."""
    return {name: version for name, version in versions().items() if name in _COMPARED}


def need_versions(wanted: dict[str, str]) -> str:
    """Make sure that this node computes with the same packages; returns its address.

    Raises:
        UserError: it has others.
    """
    node, here = ray.util.get_node_ip_address(), versions()
    for name, version in wanted.items():
        if here.get(name) != version:
            raise UserError(f"node {node} has {name} {here.get(name)}, this run {version}; install the same there")
    return node


def enter(folder: str) -> None:
    """Let relative paths begin where the command was typed."""
    with suppress(OSError):  # of a node without it, paths that begin there are not found
        os.chdir(folder)


def got(reference: Any) -> Any:
    """An object of Ray's store.

    Raises:
        RayError: those who compute it are lost.
        UserError: a node has not the packages.
        Exception: as whoever computes it raised it.
    """
    try:
        return ray.get(reference)
    except (RayActorError, RayTaskError) as error:
        _refuse_packages(str(error), error)
        cause: Any = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
            cause = cause.cause
        if isinstance(cause, RayError):
            raise
        raise cause from error


def _refuse_packages(said: str, error: RayError) -> None:
    """What a node says in whose Python something of the program is missing."""
    if "failed to import on the worker" in said:
        node, package = re.search(r"\bip=([^,)\s]+)", said), re.search(r"No module named '(\w+)", said)
        raise UserError(
            f"node {node[1] if node else '(unknown)'} cannot import {package[1] if package else 'what runs here'}; "
            "install the same packages there"
        ) from error


def lost(error: RayError) -> UserError:
    """What to say where Ray gave up."""
    if isinstance(error, RayTaskError):
        raise error  # of the program, not of Ray
    lines = [line for line in map(one_line, str(error).splitlines()) if line]
    reason = next(reversed(lines), type(error).__name__)[:200]
    return UserError(
        f"processes of Ray ended {ATTEMPTS} times over the same work, or could not begin ({reason}); what is "
        "complete stays, the same command goes on from it"
    )
