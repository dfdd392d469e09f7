"""Real templates of different families, against texts written by hand.

The campaign compares every cell of the matrix with what an oracle reads off the template's own rendering. The
oracle must find the texts written here.
"""

import pytest

from chat_tokenizer import Appended
from tests.support.templates.matrix import Cell, trial
from tests.support.templates.pairing import pairing
from tests.support.templates.sampling import ENDINGS, Turn
from tests.support.templates.shapes import SHAPES

_SHAPES = {shape.name: shape for shape in SHAPES}
_RESULT = '{"newsun": true, "high": 24.50}'
_JSON_RESULT = r'"{\"newsun\": true, \"high\": 24.50}"'
_CHATML_USER = "\n<|im_start|>user\nAnd newest tomorrow?<|im_end|>\n<|im_start|>assistant\n"

# (pairing, conversation, ending): the end of the sampled text, and the text to append
_CELLS = {
    # thinking is stripped from earlier turns, and stays in the ids
    ("qwen3", "reasoning", "own stop"): (
        "\n</think>\n\nIt is sunny in Zürich today, with a light wind from the west.<|im_end|>",
        _CHATML_USER,
    ),
    # the model samples its EOS in place of the close
    ("qwen3", "content", "other stop"): ("from the west.<|endoftext|>", _CHATML_USER),
    # earlier turns end with another token than the last one
    ("gptoss", "reasoning", "own stop"): (
        "<|channel|>final<|message|>It is sunny in Zürich today, with a light wind from the west.<|return|>",
        "<|start|>user<|message|>And newest tomorrow?<|end|><|start|>assistant",
    ),
    # the token that opens the next message ends the turn
    ("glm4moe", "call", "own stop"): (
        "°C</arg_value>\n</tool_call><|observation|>",
        f"\n<tool_response>\n{_RESULT}\n</tool_response><|assistant|>",
    ),
    ("gemma4_v5 on gemma_like", "call, then result and user", "length"): (
        'unit:<|"|>°C<|"|>}<tool_call|>',
        f'<|tool_response>response:weather{{value:<|"|>{_RESULT}<|"|>}}<tool_response|><turn|>\n'
        "<|turn>user\nAnd newest tomorrow?<turn|>\n<|turn>model\n",
    ),
    ("llama3_1", "call", "own stop"): (
        '"unit": "°C"}}<|eot_id|>',
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{_JSON_RESULT}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    ("deepseekv3", "content", "length"): (
        "with a ligh",
        "<\uff5cend\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>And newest tomorrow?"
        "<\uff5cAssistant\uff5c><think>\n",
    ),
    # these tokens absorb the line feed after them
    ("phi3", "content", "own stop"): (
        "from the west.<|end|>",
        "<|user|>And newest tomorrow?<|end|><|assistant|>",
    ),
    # the token limit cut the turn between the tokens of its close
    ("cohere2", "content", "part of the close"): (
        "from the west.<|END_RESPONSE|>",
        "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>And newest tomorrow?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",
    ),
}


@pytest.mark.parametrize("names", _CELLS, ids=" | ".join)
def test_appended_text_is_the_one_written_by_hand(names: tuple[str, str, str]) -> None:
    template, shape, ending = names
    subject, cell = trial(pairing(template)), Cell(_SHAPES[shape], ending, "none")
    turn = subject.turn(cell.shape, cell.variables)
    assert isinstance(turn, Turn), turn
    sampled = ENDINGS[ending](turn)
    end_of_turn, expected = _CELLS[names]
    assert sampled.text.endswith(end_of_turn)
    assert subject.oracle.decode(sampled.expected) == expected
    ids = subject.prompt_ids(cell, turn, sampled)
    appended = subject.append(cell, sampled, ids, history=True)
    assert isinstance(appended, Appended), appended
    assert appended.prompt_ids == ids + appended.close_ids + appended.suffix_ids
    assert appended.prompt_ids[len(ids) :] == sampled.expected
