"""Adds a row to the table of evidence, and follows the fact from the engine to the export.

A program of its own, because the rooms read the table when they are imported.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenproxy.base import evidence
from tokenproxy.base.evidence import Fact, Joining

_FACT = Fact(
    "entropies",
    list[float],
    asked_by="return_entropies",
    per_id=True,
    pieces=Joining.CONCATENATED,
    segments=Joining.CONCATENATED,
)
for _table in ("EVIDENCE", "ASKED", "RECORDED"):
    setattr(evidence, _table, (*getattr(evidence, _table), _FACT))

# ruff: noqa: E402 - after the table has the row
from tests.support.fake_vllm import FakeVllm, Reply, Variant, data_of, script
from tests.support.talk import CHAT, user
from tests.support.tiny_model import SPLIT, make_tiny_model
from tests.support.utils import run_proxy


def _entropies(ids: Any) -> list[float]:
    return [each / 2 for each in ids]


def _check(model: Any, variant: Variant, store: str) -> None:
    with (
        FakeVllm(model, variant) as one,
        FakeVllm(model, variant) as other,
    ):
        engines = [one, other]
        for engine in engines:
            engine.facts = {("entropies", "return_entropies"): _entropies}
        with run_proxy(engines, store=store, resume="all") as client:
            for path, asked, stream, breaks in (
                (path, asked, stream, breaks)
                for path in (CHAT, "/v1/completions")
                for asked in (False, True)
                for stream in (False, True)
                for breaks in (False, True)
                if not (breaks and path != CHAT)
            ):
                name = f"{variant}-{path[4:8]}-{asked}-{stream}-{breaks}"
                body: dict[str, Any] = {"stream": stream, "return_entropies": asked, "max_tokens": 50}
                body |= {"messages": [user(name)]} if path == CHAT else {"prompt": [1, 74]}
                body["n"] = 1 if breaks else 2
                for engine in engines:
                    engine.replies.clear()
                if breaks:
                    script(engines, Reply(ids=SPLIT[:3], finish="abort"), Reply(ids=SPLIT[3:]))
                answer = client.post(path, json=body, headers={"x-session-id": name})
                assert answer.status_code == 200, answer.text
                parts = list(data_of(answer.content)) if stream else [answer.json()]
                choices = [choice for part in parts for choice in part["choices"]]
                shown = [each for choice in choices for each in choice.get("entropies") or ()]
                samples = client.get(f"/v1/sessions/{name}/samples").json()["samples"]
                assert len(samples) == body["n"], name
                sampled = [id for sample in samples for id in sample["completion_ids"]]
                assert sorted(shown) == (sorted(_entropies(sampled)) if asked else []), name
                for sample in samples:
                    [turn] = sample["turns"]
                    assert turn["entropies"] == _entropies(sample["completion_ids"]), name
                    assert not breaks or turn["segments"], name
        _check_lack(one)


def _check_lack(engine: FakeVllm) -> None:
    """A turn of which one segment reports nothing is recorded without the fact."""
    engine.facts = {
        ("entropies", "return_entropies"): lambda ids: _entropies(ids) if set(ids) <= {*SPLIT[:2]} else None
    }
    with run_proxy([engine], store="memory:") as client:
        script([engine], Reply(ids=SPLIT, break_at=3, how="reset"), Reply(ids=SPLIT[2:]))
        client.post(CHAT, json={"messages": [user("Hi")], "stream": True}, headers={"x-session-id": "lack"})
        [sample] = client.get("/v1/sessions/lack/samples").json()["samples"]
        [turn] = sample["turns"]
        assert (sample["completion_ids"], turn["entropies"]) == (list(SPLIT), None)
        assert len(turn["segments"]) == 2


def main(variant: Variant, store: str) -> None:
    """Follow the fact through a proxy with this store, before engines of this kind."""
    with TemporaryDirectory() as folder:
        _check(make_tiny_model(Path(folder)), variant, store)


if __name__ == "__main__":
    main(Variant(sys.argv[1]), sys.argv[2])
