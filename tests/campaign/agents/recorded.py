"""What a session must hold after a program worked against a scripted engine."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from proxy.client import Client
from tests.campaign.agents.scripted_engine import Script

Turn = dict[str, Any]
_Generation = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and completion."""


def check_recorded(url: str, session: str, script: Script, *, killed: bool = False) -> list[Turn]:
    """Everything that was sampled is recorded, with the prompt that the engine got; every leaf is a sample.

    Every turn that continues another one does so without a reason, and begins with all its ids.

    Args:
        killed: an engine was: the last ids that it sent may not have arrived.

    Returns:
        The turns, in order.
    """
    unexpected = [sampled.new[-2000:] for sampled in script.sampled if sampled.step is None]
    assert not unexpected, unexpected
    with Client(url) as client:
        turns: list[Turn] = client.session(session, ids=True).turns
        samples = client.samples(session)
    whole: dict[str | None, list[int]] = {None: []}
    recorded = []
    for turn in turns:
        assert turn["problem"] is None
        prompt = [*whole[turn["parent"]], *turn["appended_ids"]]
        assert turn["reused"] == len(whole[turn["parent"]])
        assert (turn["source"], turn["reason"]) == ("extended", None) or turn["parent"] is None, turn
        whole[turn["id"]] = [*prompt, *turn["completion_ids"]]
        recorded.append((tuple(prompt), tuple(turn["completion_ids"])))
    sampled = Counter((tuple(each.prompt), each.sent) for each in script.sampled if each.sent)
    if killed:
        sampled = _as_arrived(sampled, recorded)
    assert Counter(recorded) == sampled, [
        [tuple(map(len, each)) for each in of] for of in (sampled, recorded)
    ]
    leaves = whole.keys() - {turn["parent"] for turn in turns}
    by_leaf = {sample["leaf"]: sample["prompt_ids"] + sample["completion_ids"] for sample in samples.samples}
    assert by_leaf == {leaf: whole[leaf] for leaf in leaves}
    assert samples.refused == []
    return turns


def _as_arrived(sampled: Counter[_Generation], recorded: Sequence[_Generation]) -> Counter[_Generation]:
    """The generations that were sampled, each as far as it is recorded."""
    arrived: Counter[_Generation] = Counter()
    for prompt, ids in sampled.elements():
        found = [(p, c) for p, c in recorded if p == prompt and c == ids[: len(c)]]
        arrived[max(found, key=lambda each: len(each[1]), default=(prompt, ids))] += 1
    return arrived
