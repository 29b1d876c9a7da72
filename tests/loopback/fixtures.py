"""Fixtures for tests against the loopback Hub: for each test an empty `hub`, and a `client` with an empty home."""

from collections.abc import Callable, Iterator

import pytest

from loopback.client import Client, Loopback


@pytest.fixture(scope="session")
def loopback_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    with Loopback(tmp_path_factory.mktemp("loopback")) as server:
        yield server


@pytest.fixture(scope="session")
def _client_of(loopback_server: Loopback, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Client]]:
    """The client of a profile, started when it is first asked for."""
    clients: dict[str, Client] = {}

    def find(transport: str, profile: str = "with") -> Client:
        if profile not in clients:
            clients[profile] = Client(loopback_server, tmp_path_factory.mktemp(profile), profile)
        clients[profile].transport = transport
        clients[profile].clear()
        return clients[profile]

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
    return _client_of(request.param)


@pytest.fixture
def xet_client(hub: Loopback, _client_of: Callable[..., Client]) -> Client:
    """The same over Xet alone, for what does not depend on the transport."""
    return _client_of("xet")


@pytest.fixture
def stranger(hub: Loopback, _client_of: Callable[..., Client]) -> Client:
    """Fresh processes in which hf_vit cannot be imported."""
    return _client_of("xet", "without")
