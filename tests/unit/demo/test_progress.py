import threading

from proxy.demo.progress import Heartbeat, shorten


def test_heartbeat_reports_label_and_detail_until_the_block_ends():
    lines = []
    two_lines = threading.Event()

    def progress(line):
        lines.append(line)
        if len(lines) == 2:
            two_lines.set()

    with Heartbeat(progress, "waiting", lambda: "for nothing", interval_s=0.01):
        assert two_lines.wait(5)
    count = len(lines)
    assert lines[0] == "waiting (0 s) for nothing"
    assert len(lines) == count


def test_heartbeat_is_silent_in_a_short_block():
    lines: list[str] = []
    with Heartbeat(lines.append, "waiting"):
        pass
    assert lines == []


def test_shorten():
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
