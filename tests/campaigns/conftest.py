"""Commands that are ready to be struck."""

from collections.abc import Callable, Iterator

import pytest
from campaigns import strikes
from campaigns.commands import template
from campaigns.places import Prepared, prepare
from campaigns.watched import Watcher

Preparing = Callable[[Watcher], Callable[[str], Prepared]]


@pytest.fixture(scope="session")
def watcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watcher]:
    watching = Watcher(tmp_path_factory.mktemp("watched"))
    yield watching
    watching.close()


@pytest.fixture(scope="session")
def preparing(tmp_path_factory: pytest.TempPathFactory) -> Preparing:
    """Makes, for a watcher, commands by their names, with what they start from and lead to; each once."""
    known: dict[str, Prepared] = {}
    start = template(tmp_path_factory.mktemp("template"))

    def made_by(watcher: Watcher) -> Callable[[str], Prepared]:
        def make(name: str) -> Prepared:
            if name not in known:
                folder = tmp_path_factory.mktemp("start") / "place"
                known[name] = prepare(watcher, strikes.named(name), start, folder)
            return known[name]

        return make

    return made_by


@pytest.fixture(scope="session")
def prepared(watcher: Watcher, preparing: Preparing) -> Callable[[str], Prepared]:
    """A command by its name."""
    return preparing(watcher)
