"""What the pages promise, run as it is written."""

import re
from argparse import Namespace

import pytest

from tests.acceptance.conftest import Server
from tests.campaign.real_vllm.conftest import only_inside
from tests.support.snippets import OUR_ADDRESS, Snippet, programs
from tokenproxy.demo.main import run_demo

_PROGRAMS = [each for each in programs() if OUR_ADDRESS.search(each.code)]


@pytest.mark.parametrize("snippet", _PROGRAMS, ids=lambda each: each.name)
def test_examples_run(server: Server, snippet: Snippet) -> None:
    exec(compile(snippet.at(server.url), snippet.page, "exec"), {})


@only_inside
def test_the_demo_shows_a_hundred_per_cent(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_demo(Namespace(serve=False, url=server.url, log=None))
    assert code == 0
    shown = capsys.readouterr().out
    for route in ("token route", "\nchat route"):
        assert re.search(rf"{route}: (\d+) of \1 follow-up turns exact \(100\s?%\)", shown)
