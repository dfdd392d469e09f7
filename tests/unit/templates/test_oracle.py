"""The oracle against expectations written by hand, and against whole renderings."""

import pytest

from tests.support.templates.matrix import Matrix
from tests.support.templates.oracle import Reason, Undecided
from tests.support.templates.pairing import EVERY_PAIRING, Pairing, pairing
from tests.support.templates.sampling import ENDINGS, Turn, sampled_ids
from tests.support.templates.shapes import SHAPES

_SHAPES = {shape.name: shape for shape in SHAPES}
_RESULT = '{"newsun": true, "high": 24.50}'
_JSON_RESULT = r'"{\"newsun\": true, \"high\": 24.50}"'

# (template, conversation, ending): the end of the sampled text, and the text to append
_WRITTEN_BY_HAND = {
    ("qwen3", "reasoning", "own stop"): (
        "\n</think>\n\nIt is sunny in Zürich today, with a light wind from the west.<|im_end|>",
        "\n<|im_start|>user\nAnd newest tomorrow?<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("qwen3", "parallel calls", "own stop"): (
        '"unit": "°C"}}\n</tool_call><|im_end|>',
        f"\n<|im_start|>user\n<tool_response>\n{_RESULT}\n</tool_response>\n<tool_response>\nnewclock says\n"
        "  nine 九 o'clock\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    ("qwen3", "content", "other stop"): (
        "from the west.<|endoftext|>",
        "\n<|im_start|>user\nAnd newest tomorrow?<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("qwen3", "content", "length"): (
        "with a ligh",
        "<|im_end|>\n<|im_start|>user\nAnd newest tomorrow?<|im_end|>\n<|im_start|>assistant\n",
    ),
    ("gptoss", "reasoning", "own stop"): (
        "<|channel|>final<|message|>It is sunny in Zürich today, with a light wind from the west.<|return|>",
        "<|start|>user<|message|>And newest tomorrow?<|end|><|start|>assistant",
    ),
    ("gptoss", "content", "stop string"): (
        "with a ligh END",
        "<|end|><|start|>user<|message|>And newest tomorrow?<|end|><|start|>assistant",
    ),
    ("gptoss", "call", "own stop"): (
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Zürich", '
        '"days": [1, false, null], "unit": "°C"}<|call|>',
        "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        f"{_JSON_RESULT}<|end|><|start|>assistant",
    ),
    ("gptoss", "call", "length"): (
        '"unit": "°C"}',
        "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>"
        f"{_JSON_RESULT}<|end|><|start|>assistant",
    ),
    ("glm4moe", "content", "own stop"): ("from the west.<|user|>", "\nAnd newest tomorrow?<|assistant|>"),
    ("glm4moe", "content", "other stop"): (
        "from the west.<|endoftext|>",
        "<|user|>\nAnd newest tomorrow?<|assistant|>",
    ),
    ("glm4moe", "call", "own stop"): (
        "°C</arg_value>\n</tool_call><|observation|>",
        f"\n<tool_response>\n{_RESULT}\n</tool_response><|assistant|>",
    ),
    ("glm4moe", "call", "abort"): (
        "°C</arg_value>\n</tool_call>",
        f"<|observation|>\n<tool_response>\n{_RESULT}\n</tool_response><|assistant|>",
    ),
    ("gemma4", "content", "own stop"): (
        "from the west.<turn|>",
        "\n<|turn>user\nAnd newest tomorrow?<turn|>\n<|turn>model\n",
    ),
    ("gemma4", "parallel calls, results swapped", "own stop"): (
        'unit:<|"|>°C<|"|>}<tool_call|><|tool_response>',
        'response:clock{value:<|"|>newclock says\n  nine 九 o\'clock<|"|>}<tool_response|>'
        f'<|tool_response>response:weather{{value:<|"|>{_RESULT}<|"|>}}<tool_response|>',
    ),
    ("gemma4", "call, then result and user", "length"): (
        'unit:<|"|>°C<|"|>}<tool_call|>',
        f'<|tool_response>response:weather{{value:<|"|>{_RESULT}<|"|>}}<tool_response|>'
        "<|turn>user\nAnd newest tomorrow?<turn|>\n<|turn>model\n",
    ),
    ("gemma4_v5", "call, then result and user", "length"): (
        'unit:<|"|>°C<|"|>}<tool_call|>',
        f'<|tool_response>response:weather{{value:<|"|>{_RESULT}<|"|>}}<tool_response|><turn|>\n'
        "<|turn>user\nAnd newest tomorrow?<turn|>\n<|turn>model\n",
    ),
    ("llama3_1", "call", "own stop"): (
        '"unit": "°C"}}<|eot_id|>',
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{_JSON_RESULT}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("phi3", "content", "length"): (
        "with a ligh",
        # these tokens absorb the line feed after them
        "<|end|><|user|>And newest tomorrow?<|end|><|assistant|>",
    ),
    ("phi3", "content", "own stop"): (
        "from the west.<|end|>",
        # the sampled token absorbs the line feed
        "<|user|>And newest tomorrow?<|end|><|assistant|>",
    ),
    ("cohere2", "content", "part of the close"): (
        "from the west.<|END_RESPONSE|>",
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>And newest tomorrow?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
    ),
    ("nemotron_3_nano", "reasoning", "length in reasoning"): (
        "The user asks about Zürich, so I",
        "<|im_end|>\n<|im_start|>user\nAnd newest tomorrow?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    ("nemotron_3_nano", "call", "own stop"): (
        "</function>\n</tool_call>\n<|im_end|>",
        f"\n<|im_start|>user\n<tool_response>\n{_RESULT}\n</tool_response>\n<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n",
    ),
}


# (template, conversation): why its rendering does not show what follows the turn
_UNDECIDED = {
    (
        "deepseekv3",
        "call",
    ): Reason.REFUSED,  # it concatenates the arguments with text, but engines send an object
    ("deepseekv3", "call after results"): Reason.PROMPT_REFUSED,
    ("gemma", "content after system"): Reason.PROMPT_REFUSED,
    ("gemma4", "content and call"): Reason.REORDERED,
    ("gemma4", "content, then a result"): Reason.NEW_NOT_PRINTED,
    ("gptoss", "parallel calls"): Reason.TURN_NOT_PRINTED,
    ("llama3_1", "parallel calls"): Reason.REFUSED,
    ("phi3", "call"): Reason.TURN_NOT_PRINTED,
}


@pytest.mark.parametrize("cell", _WRITTEN_BY_HAND, ids=" | ".join)
def test_oracle_equals_expectations_written_by_hand(matrix: Matrix, cell: tuple[str, str, str]) -> None:
    template, shape, ending = cell
    trial = matrix.trial(pairing(template))
    turn = trial.turn(_SHAPES[shape], "none")
    assert isinstance(turn, Turn), turn
    sampled = ENDINGS[ending](turn)
    text, appended = _WRITTEN_BY_HAND[cell]
    assert sampled.text.endswith(text)
    assert trial.oracle.decode(sampled.expected) == appended


@pytest.mark.parametrize("cell", _UNDECIDED, ids=" | ".join)
def test_oracle_tells_why_it_has_no_answer(matrix: Matrix, cell: tuple[str, str]) -> None:
    template, shape = cell
    turn = matrix.trial(pairing(template)).turn(_SHAPES[shape], "none")
    assert isinstance(turn, Undecided)
    assert turn.reason is _UNDECIDED[cell]


@EVERY_PAIRING
def test_ids_after_a_turn_equal_those_of_the_whole_rendering(matrix: Matrix, pairing: Pairing) -> None:
    """The oracle encodes only the text after the turn; an engine encodes the whole rendering."""
    oracle = matrix.trial(pairing).oracle
    for shape in SHAPES:
        turn = matrix.trial(pairing).turn(shape, "none")
        if isinstance(turn, Undecided) or not oracle.added_tokens.match(turn.end.text):
            continue
        whole = oracle.render([*shape.history, *shape.new], shape, {})
        assert whole.endswith(turn.end.text), shape.name
        ids = turn.whole_end()
        assert oracle.encode(whole)[-len(ids) :] == ids, shape.name


@EVERY_PAIRING
def test_sampled_ids_spell_the_text_in_unusual_ids(matrix: Matrix, pairing: Pairing) -> None:
    trial = matrix.trial(pairing)
    turn = trial.turn(_SHAPES["odd text"], "none")
    assert isinstance(turn, Turn)
    text = ENDINGS["own stop"](turn).text
    ids = sampled_ids(text, "a seed", trial.oracle)
    assert ids == sampled_ids(text, "a seed", trial.oracle) != sampled_ids(text, "another seed", trial.oracle)
    assert ids != trial.oracle.encode(text)
    if pairing.vocabulary == "bytes":
        assert trial.oracle.decode(ids) == text
