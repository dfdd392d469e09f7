import threading

from proxy.demo.progress import Heartbeat, shorten


def test_heartbeat_speaks_with_its_detail_until_the_block_ends():
    lines = []
    twice = threading.Event()

    def say(line):
        lines.append(line)
        if len(lines) == 2:
            twice.set()

    with Heartbeat(say, "waiting", lambda: "for nothing", interval_s=0.01):
        assert twice.wait(5)
    said = len(lines)
    assert lines[0] == "waiting (0 s) for nothing"
    assert len(lines) == said


def test_heartbeat_is_silent_in_a_short_block():
    lines: list[str] = []
    with Heartbeat(lines.append, "waiting"):
        pass
    assert lines == []


def test_shorten():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
