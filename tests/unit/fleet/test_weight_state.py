"""The state of a fleet's weights in one process, with a store that can be read and sometimes written."""

from collections.abc import Awaitable, Mapping

from msgspec.structs import replace

from tokenproxy.fleet.fleet import Fleet
from tokenproxy.fleet.weight_state import SharedError


class _Words:
    shared = True

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.full = False

    async def read(self) -> Mapping[str, str]:
        return dict(self.words)

    async def write(self, name: str, word: str | None) -> None:
        if self.full:
            raise SharedError("OOM command not allowed when used memory > 'maxmemory'")
        assert word is not None
        self.words[name] = word

    async def wait(self, work: Awaitable[object]) -> None:
        await work


async def test_a_version_that_could_not_be_written_is_not_forgotten_when_a_pause_ends() -> None:
    weights = Fleet([]).weights
    weights.words = words = _Words()
    await weights.change(replace(weights.state, version="1", revision=1, paused="keep"))
    words.full = True
    await weights.change(replace(weights.state, version="2", revision=2))
    await weights.change(replace(weights.state, paused=""), adopt=False)
    await weights.refresh()
    assert weights.state.version == "2"
    words.full = False
    await weights.change(replace(weights.state, paused=""))
    await weights.refresh()
    assert (weights.state.version, weights.state.paused) == ("2", "")
