"""What the pages promise, run as it is written."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.conftest import only_inside
from tokenproxy.demo.main import run_demo

_ROOT = Path(__file__).parents[3]
_PAGES = ("README", *(f"docs/{name}" for name in ("conversations", "messages", "responses", "routes")))
_TEXT = "".join((_ROOT / f"{page}.md").read_text() for page in _PAGES)
_BLOCKS = [
    block for block in re.findall(r"```python\n(.*?)```", _TEXT, re.DOTALL) if "127.0.0.1:8100" in block
]


def test_there_are_examples() -> None:
    assert len(_BLOCKS) == 7


@pytest.mark.parametrize("block", _BLOCKS)
def test_examples_run(server: Server, block: str) -> None:
    exec(compile(block.replace("http://127.0.0.1:8100", server.url), "README.md", "exec"), {})


@only_inside
def test_the_demo_shows_a_hundred_per_cent(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_demo(Namespace(serve=False, url=server.url, log=None))
    assert code == 0
    shown = capsys.readouterr().out
    for route in ("token route", "\nchat route"):
        assert re.search(rf"{route}: (\d+) of \1 follow-up turns exact \(100\s?%\)", shown)
