"""Commands that are killed, or told to end, at every change of files and at random moments."""

import random
from collections.abc import Callable, Iterator

import pytest
from campaigns import strikes
from campaigns.commands import READING, SHARING, WRITING
from campaigns.ledger import Campaign, failures
from campaigns.places import Prepared
from campaigns.watched import Watcher

from hf_vit.conversion.targets.registry import TARGETS
from hf_vit.training.pretraining import OBJECTIVES
from hf_vit_cli.main import COMMANDS, build_app


def test_every_command_is_in_a_table():
    groups = {group.name: group.typer_instance for group in build_app().registered_groups}
    words = {" ".join(command.arguments[:2]) for command in (WRITING | READING | SHARING).values()}
    for name in COMMANDS:
        wanted = [f"{name} {one.name}" for one in groups[name].registered_commands] if name in groups else [name]
        for command in wanted:
            assert any(f"{word} ".startswith(f"{command} ") for word in words), f"'{command}' is in no table"
    options = [word for command in WRITING.values() for word in command.arguments]
    assert {f"export-{name}" for name in TARGETS} | {f"pretrain-{name}" for name in OBJECTIVES} <= WRITING.keys()
    assert {"--report", "--force", "--sweep-rates"} <= set(options)


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
