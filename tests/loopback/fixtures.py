"""Fixtures for tests against the loopback Hub: `hub` for each test an empty one, `client` once a transport."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loopback.client import Client, Loopback


@pytest.fixture(scope="session")
def loopback_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with Loopback(tmp_path_factory.mktemp("loopback")) as server:
        yield server


@pytest.fixture(scope="session")
def _client_of(loopback_server: Loopback, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """Clients by transport and profile, each started when it is first asked for."""
    clients: dict[tuple[str, str], Client] = {}

    def find(transport: str, profile: str = "with") -> Client:
        if (transport, profile) not in clients:
            folder: Path = tmp_path_factory.mktemp(f"{transport}-{profile}")
            clients[transport, profile] = Client(loopback_server, folder, transport, profile)
        return clients[transport, profile]

    yield find
    for client in clients.values():
        client.close()


@pytest.fixture
def hub(loopback_server: Loopback) -> Iterator[Loopback]:
    """An empty Hub. Afterwards everything it holds must be sound, and no token may have left the Hub's own origin."""
    loopback_server.reset()
    yield loopback_server
    assert loopback_server.fsck() == []
    log = loopback_server.log()
    assert [entry for entry in log if entry["origin"] == "storage" and entry["hub_token"]] == []
    assert [entry for entry in log if "bug" in entry] == []
    assert [entry for entry in log if "unknown" in entry] == []


@pytest.fixture(params=["lfs", "xet"])
def client(request: pytest.FixtureRequest, hub: Loopback, _client_of: Callable[..., Client]) -> Client:
    """Fresh processes with an empty HF_HOME and hf_vit installed; every test runs over both transports."""
    found = _client_of(request.param)
    found.clear()
    return found


@pytest.fixture
def xet_client(hub: Loopback, _client_of: Callable[..., Client]) -> Client:
    """The same over Xet alone, for what does not depend on the transport."""
    found = _client_of("xet")
    found.clear()
    return found


@pytest.fixture
def stranger(hub: Loopback, _client_of: Callable[..., Client]) -> Client:
    """Fresh processes in which hf_vit cannot be imported."""
    found = _client_of("xet", "without")
    found.clear()
    return found
