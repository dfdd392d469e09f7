"""Random trees of turns, sampled in random ids and spelled in random ways: nothing is ever lost."""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fake_vllm import Reply, Variant
from tests.support.talk import Message, Talk, user
from tests.support.tiny_model import END, TinyModel
from tests.support.utils import Pair

_IDS = st.lists(st.integers(3, 299), min_size=1, max_size=6)
STEP = st.fixed_dictionaries(
    {
        "at": st.integers(0, 99),
        "ids": _IDS,
        "ended": st.booleans(),
        "reasoning": st.sampled_from([None, "", "so", " so\n"]),
        "around": st.sampled_from(["", " ", "\n", "\u00a0"]),
        "stream": st.booleans(),
        "spelled": st.lists(st.sampled_from(["strip", "parts", "quiet", "other"]), max_size=3),
    }
)


def _spelled(message: Message, how: list[str]) -> Message:
    """One of the messages that a client may make of one."""
    made = dict(message)
    for each in how:
        if each == "strip" and isinstance(made["content"], str):
            made["content"] = made["content"].strip()
        elif each == "parts" and isinstance(made["content"], str):
            made["content"] = [{"type": "text", "text": made["content"]}]
        elif each == "quiet":
            made = {name: value for name, value in made.items() if not name.startswith("reasoning")}
        elif each == "other" and "reasoning" in made:
            made["reasoning_content"] = made.pop("reasoning")
    return made


@settings(max_examples=300)
@given(steps=st.lists(STEP, min_size=2, max_size=8))
def test_every_turn_continues_the_exact_ids_of_its_parent(
    pairs: Callable[[Variant], Pair], tiny_model: TinyModel, steps: list[dict[str, Any]]
) -> None:
    pair = pairs(Variant.CHAT)
    root = Talk(pair, tiny_model)
    histories: list[tuple[list[Message], list[int]]] = []
    for index, step in enumerate(steps):
        ids = (*step["ids"], END) if step["ended"] else tuple(step["ids"])
        text = f"{step['around']}{tiny_model.decode(list(ids))} {index}{step['around']}"
        message = {"content": text} | ({} if step["reasoning"] is None else {"reasoning": step["reasoning"]})
        reply = Reply(ids, message=message)
        made = Talk(pair, tiny_model, list(root.messages))
        if not histories:
            made.ask(reply=reply, stream=step["stream"])
        else:
            history, before = histories[step["at"] % len(histories)]
            made.messages = [
                _spelled(one, step["spelled"]) if one["role"] == "assistant" else one for one in history
            ]
            answered = made.follow(user(f"more {index}"), reply=reply, stream=step["stream"], expected=before)
            assert answered.reason in ("", "text_stripped")
            made.messages[: len(history)] = history
        histories.append((made.messages, made.ids))
