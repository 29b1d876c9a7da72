"""Commands that are killed, or told to end, at every change of files and at random moments."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from campaigns import strikes
from campaigns.commands import READING, SHARING, WRITING
from campaigns.ledger import Campaign, failures
from campaigns.places import Prepared
from campaigns.watched import Watcher

from hf_vit.conversion.targets.registry import TARGETS
from hf_vit.training.pretraining import OBJECTIVES
from hf_vit_cli.main import build_app


def leaves(command: Any, words: str = "") -> Iterator[tuple[str, list[Any]]]:
    """The words of every command, and its parameters."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, f"{words}{name} ")
    if not hasattr(command, "commands"):
        yield words, command.params


def test_every_command_is_in_a_table():
    rows = [" ".join((*command.arguments, "")) for command in (WRITING | READING | SHARING).values()]
    for words, parameters in leaves(typer.main.get_command(build_app())):
        options = {option for one in parameters if one.default is None or one.is_flag for option in one.opts}
        of_it = [row for row in rows if row.startswith(words)]
        assert of_it, f"'{words}' is in no table"
        for option in options & {"--output", "--report", "--force", "--push", "--results", "--sweep-rates"}:
            assert any(f" {option} " in row for row in of_it), f"'{words}' is in no table with {option}"
    installed = {f"export-{name}" for name in TARGETS if name != "executorch"}  # which has an environment of its own
    assert installed | {f"pretrain-{name}" for name in OBJECTIVES} <= WRITING.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", READING)
def test_commands_that_read_write_nothing(name: str, watcher: Watcher, prepared: Callable[[str], Prepared]) -> None:
    assert not prepared(name).changes
    assert prepared(name).after == prepared(name).before


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_killed_at_every_change_and_at_random_moments(watcher: Watcher, prepared: Callable[[str], Prepared]) -> None:
    def cases() -> Iterator[str]:
        for name in WRITING:
            command, moments = prepared(name), random.Random(name)
            yield from (f"{name}, SIGKILL at a change/{at}" for at in strikes.every_change(command, name, "SIGKILL"))
            for what in ("SIGINT", "SIGTERM"):
                yield from (
                    f"{name}, {what} at a change/{at}"
                    for at in strikes.some_changes(command, name, what, 6 // strikes.THINNED + 1)
                )
            yield from (
                f"{name}, SIGKILL at a random moment/{number} {moments.uniform(0, 1.1):.3f}"
                for number in range(6 // strikes.THINNED + 1)
            )

    def attempt(case: str) -> str:
        group, _, which = case.partition("/")
        name, _, how = group.partition(", ")
        at, _, after = which.partition(" ")
        command = prepared(name)
        when = {"after": float(after) * command.seconds} if after else {"at": int(at)}
        return strikes.kill(watcher, command, how.split()[0], **when)

    command = "pytest -m slow tests/campaigns/test_kills.py"
    counts = Campaign("kills", command, seed=0, thinned=strikes.THINNED).run(cases(), attempt)
    assert not failures(counts)
