"""What a server recorded of a session."""

from dataclasses import dataclass
from typing import Any

import httpx

from tests.support.utils import wait_until

SESSIONS = "/v1/sessions"


@dataclass(frozen=True)
class Record:
    """The turns of a session with their ids, and the samples that it makes."""

    turns: list[dict[str, Any]]
    samples: dict[str, Any]

    def check_exact(self) -> list[tuple[list[int], list[int]]]:
        """Check that each turn continues all ids of the one before, by the engine's counts, in one sample.

        Returns:
            The prompt of each turn, and what was sampled.
        """
        ids = [turn["id"] for turn in self.turns]
        assert [turn["parent"] for turn in self.turns] == [None, *ids[:-1]]
        exact: list[tuple[list[int], list[int]]] = []
        so_far: list[int] = []
        for turn in self.turns:
            prompt, sampled = so_far + turn["appended_ids"], turn["completion_ids"]
            assert turn["problem"] is None
            assert turn["prompt_tokens"] == len(prompt)
            assert turn["completion_tokens"] == len(sampled) == len(turn["logprobs"]) > 0
            assert turn["reused"] == len(so_far)
            exact.append((prompt, sampled))
            so_far = prompt + sampled
        self.check_sample()
        return exact

    def check_sample(self) -> None:
        """Check the one sample: every sampled id, and no other, is trained with its log-probability."""
        assert self.samples["refused"] == []
        [sample] = self.samples["samples"]
        first, *rest = self.turns
        ids, mask, logprobs = (
            list(first["completion_ids"]),
            [1] * len(first["completion_ids"]),
            first["logprobs"],
        )
        for turn in rest:
            appended, sampled = turn["appended_ids"], turn["completion_ids"]
            ids += [*appended, *sampled]
            mask += [0] * len(appended) + [1] * len(sampled)
            logprobs = [*logprobs, *[None] * len(appended), *turn["logprobs"]]
        assert sample["prompt_ids"] == first["appended_ids"]
        assert (sample["completion_ids"], sample["loss_mask"]) == (ids, mask)
        assert sample["logprobs"] == logprobs


def record_of(http: httpx.Client, session: str, turns: int) -> Record:
    """The record of a session, once it has so many turns: a stream is recorded at its end, or after it."""
    found: list[dict[str, Any]] = []

    def recorded() -> bool:
        answer = http.get(f"{SESSIONS}/{session}?ids=true")
        found[:] = answer.json()["turns"] if answer.status_code == 200 else []
        return len(found) >= turns

    wait_until(recorded, 60)
    return Record(found, http.get(f"{SESSIONS}/{session}/samples").json())
