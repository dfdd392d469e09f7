"""Given ids of a session with images, on engines that take images with exact ids and on those that do not."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from chat_tokenizer import ids
from tests.support.fake_vision import picture
from tests.support.recording import chat_request, session_ref
from tokenproxy.base.errors import BadRequest
from tokenproxy.base.images import Image
from tokenproxy.base.request import GivenIds
from tokenproxy.record.claims import Claims
from tokenproxy.record.completion import Completion, SampledChoice
from tokenproxy.record.given import GivenPrompt
from tokenproxy.record.history import History
from tokenproxy.record.plan import PromptPlan, ServedModel
from tokenproxy.record.recorder import Recording
from tokenproxy.record.vocabulary import Source

_PLACEHOLDER = 9


class _Images:
    """A model for which each image takes two ids."""

    placeholder = _PLACEHOLDER

    async def ids_of(self, image: Image) -> Sequence[int]:
        return [_PLACEHOLDER, _PLACEHOLDER]


_WITH_IMAGES = ServedModel("m", None, images=_Images(), placeholder=_PLACEHOLDER)


async def _plan(history: History, model: ServedModel, prompt: list[int], *images: str) -> PromptPlan:
    given = GivenIds("prompt_ids", ids.dump(prompt), len(prompt))
    fields: dict[str, Any] = {"messages": b"", "given": given, "images": images or None, "token_route": True}
    request = replace(chat_request(session=session_ref("s")), **fields)
    return await GivenPrompt(history.planner, request, model).plan(given, Claims(history.pins))


async def _record(history: History, prompt: list[int], *images: str) -> list[int]:
    """Record a turn; returns its ids."""
    plan = await _plan(history, _WITH_IMAGES, prompt, *images)
    assert plan.source is Source.GIVEN
    choice = SampledChoice(0, {"role": "assistant", "content": "x"}, [6], [-0.5], "stop")
    await Recording(history, plan, Claims(history.pins)).add(Completion(plan.prompt, [choice], 1))
    return [*json.loads(plan.prompt), 6]


@pytest.mark.parametrize("model", [ServedModel("m", None, placeholder=_PLACEHOLDER), ServedModel("m", None)])
async def test_recorded_images_are_never_left_out(history: History, model: ServedModel) -> None:
    whole = await _record(history, [5, _PLACEHOLDER], picture("red"))
    with pytest.raises(BadRequest) as refused:
        await _plan(history, model, [*whole, 7])
    assert (refused.value.param, refused.value.code) == ("prompt_ids", "no_images")


async def test_only_a_turn_with_the_same_images_is_continued(history: History) -> None:
    red, blue, green = map(picture, ("red", "blue", "green"))
    for image in (red, blue):
        whole = await _record(history, [5, _PLACEHOLDER], image)
    first, second = sorted(turn.id for turn in await history.store.turns("s"))
    for image, parent in ((red, first), (blue, second), (green, None)):
        plan = await _plan(history, _WITH_IMAGES, [*whole, 7], image)
        assert (plan.parent.id if plan.parent else None) == parent
    with pytest.raises(BadRequest) as refused:
        await _plan(history, _WITH_IMAGES, [*whole, 7])
    assert (refused.value.param, refused.value.code) == ("images", "images_missing")
