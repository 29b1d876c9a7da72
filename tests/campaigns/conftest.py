"""Commands that are ready to be struck."""

from collections.abc import Callable, Iterator

import pytest
from campaigns import strikes
from campaigns.commands import template
from campaigns.places import Prepared, prepare
from campaigns.watched import Watcher


@pytest.fixture(scope="session")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    watching = Watcher(tmp_path_factory.mktemp("watched"))
    yield watching
    watching.close()


@pytest.fixture(scope="session")
def prepared(watcher: Watcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Prepared]:
    """A command by name, with what it starts from and leads to; made once."""
    known: dict[str, Prepared] = {}
    start = template(tmp_path_factory.mktemp("template"))

    def make(name: str) -> Prepared:
        if name not in known:
            known[name] = prepare(watcher, strikes.named(name), start, tmp_path_factory.mktemp("start") / "place")
        return known[name]

    return make
