"""Paths through the turns of a rollout."""

from msgspec.structs import replace

from proxy.samples.traces import traces_of
from proxy.samples.tree import path_of
from tests.support.trees import child, root


def test_a_path_ends_where_turns_continue_each_other_in_a_circle() -> None:
    """Only a corrupt store holds such turns."""
    a = root("a", [1, 2], [3])
    b = child("b", a, [4], [5])
    a = replace(a, parent="b")
    turns = {"a": a, "b": b}
    assert path_of(b, turns) == [a, b]
    assert path_of(a, turns) == [b, a]
    assert path_of(replace(a, parent="a"), {"a": replace(a, parent="a")})[0].id == "a"
    assert [trace["trace_id"] for trace in traces_of([a, b], "s")] == ["a", "b"]
