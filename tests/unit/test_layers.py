"""The rooms: imports go down their list, never up, and no files import each other in a circle."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_FOLDERS = {"tokenproxy": _ROOT / "proxy", "chat_tokenizer": _ROOT / "tokenization"}
_ROOMS = [
    ["tokenproxy.cli"],
    ["tokenproxy.demo", "tokenproxy.top", "tokenproxy.agents"],
    ["tokenproxy.app"],
    ["tokenproxy.parts"],
    ["tokenproxy.web"],
    ["tokenproxy.formats"],
    ["tokenproxy.turn"],
    ["tokenproxy.viewer"],
    ["tokenproxy.samples"],
    ["tokenproxy.client"],
    ["tokenproxy.store"],
    ["tokenproxy.record"],
    ["tokenproxy.fleet"],
    ["tokenproxy.engine"],
    ["tokenproxy.settings"],
    ["tokenproxy.monitoring"],
    ["tokenproxy.base"],
    ["chat_tokenizer"],
]
"""From the top. Rooms of one line do not know each other."""


def _modules() -> dict[str, Path]:
    found = {}
    for package, folder in _FOLDERS.items():
        for path in (folder / package).rglob("*.py"):
            name = ".".join(path.relative_to(folder).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


_MODULES = _modules()


def _imports(path: Path, *, types: bool = True) -> Iterator[str]:
    """The modules that a file imports; without `types` those alone that it imports when it runs."""
    tree = ast.parse(path.read_text("utf-8"))
    for block in ast.walk(tree):
        if not types and isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in _MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _is_in(module: str, rooms: list[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in rooms)


def test_every_module_is_in_a_room() -> None:
    rooms = [room for line in _ROOMS for room in line]
    alone = {"tokenproxy", "tokenproxy.__main__"}
    assert [module for module in _MODULES if not _is_in(module, rooms) and module not in alone] == []


@pytest.mark.parametrize("rank, room", [(rank, room) for rank, line in enumerate(_ROOMS) for room in line])
def test_a_room_uses_only_rooms_below_it(rank: int, room: str) -> None:
    below = [room, *(other for line in _ROOMS[rank + 1 :] for other in line)]
    modules = [module for module in _MODULES if _is_in(module, [room])]
    assert modules or room == "tokenproxy.parts"  # it has no part yet
    upward = {
        (module, name)
        for module in modules
        for name in _imports(_MODULES[module])
        if name in _MODULES and name != "tokenproxy" and not _is_in(name, below)
    }
    assert upward == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {module: set(_imports(path, types=False)) & _MODULES.keys() for module, path in _MODULES.items()}
    while ends := {module for module, names in left.items() if not names & left.keys()}:
        left = {module: names for module, names in left.items() if module not in ends}
    assert sorted(left) == []


def test_the_client_uses_no_other_room() -> None:
    modules = [path for module, path in _MODULES.items() if _is_in(module, ["tokenproxy.client"])]
    foreign = {name for path in modules for name in _imports(path) if name in _MODULES}
    assert all(_is_in(name, ["tokenproxy.client"]) or name == "tokenproxy" for name in foreign)
