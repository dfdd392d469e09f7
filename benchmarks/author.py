"""Write the benchmark's conversations: an agent runs commands in a repository and reads their output."""

import json
import random
from typing import Any

from tokenization import ChatTokenizer

RESULT_TOKENS = 200
_SEED = 20
_LINE_TOKENS = 8
"""Lower bound of the tokens in a line of a log."""
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Run a shell command in the repository and return what it prints",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout_s": {"type": "integer"}},
                "required": ["command"],
            },
        },
    },
)
SYSTEM = {"role": "system", "content": "You fix bugs in a Python repository. Run commands, then explain."}
_VOCABULARY = (
    "the a request response stream token prompt cache engine worker queue lock thread buffer header test "
    "fails returns raises when before after because only never always same wrong first last empty missing "
    "router session timeout retry offset length index value config default handler parser message turn"
)

Messages = list[dict[str, Any]]


class Author:
    """Writes conversations: the same in every run, with no text twice."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(_SEED)
        self._words = _VOCABULARY.split()

    def result(self, tokens: int = RESULT_TOKENS, call: str = "call_0") -> Messages:
        """The output of a command, with this number of tokens."""
        lines = (self._log_line() for _ in range(tokens // _LINE_TOKENS + 1))
        printed = self._cut("\n".join(lines), tokens)
        return [{"role": "tool", "tool_call_id": call, "content": printed}]

    def results(self, count: int, *, new: bool) -> list[Messages]:
        """`count` results: all different if `new`, else all equal."""
        return [self.result() for _ in range(count)] if new else [self.result()] * count

    def history(self, length: int) -> tuple[Messages, list[int]]:
        """Messages that end with a tool call, and their ids up to its stop token: about `length`."""
        messages, preamble = [SYSTEM], self._count([])
        remaining = length - preamble
        while True:
            turns = [*self._question(self._prose(30)), *self.result(), self._assistant(self._prose(120))]
            ending = self._question("")
            size, ending_size = self._count(turns) - preamble, self._count(ending) - preamble
            if size + ending_size > remaining:
                break
            messages += turns
            remaining -= size
        messages += self._question(self._prose(remaining - ending_size))
        ids = self._tokenizer.render(messages, tools=TOOLS, add_generation_prompt=False)
        stop = self._tokenizer.stop_id(tools=TOOLS)
        return messages, ids[: len(ids) - ids[::-1].index(stop)]

    def opening(self, tokens: int) -> Messages:
        """The first messages of a conversation: the system message and a question of `tokens` tokens."""
        return [SYSTEM, {"role": "user", "content": self._prose(tokens)}]

    def sampled(self, tokens: int) -> tuple[dict[str, Any], list[int]]:
        """An assistant message with a text of this number of tokens and a tool call; and its ids."""
        message = self._question("")[1] | {"content": self._prose(tokens)}
        opening = self.opening(1)
        prompt = self._tokenizer.render(opening, tools=TOOLS)
        whole = self._tokenizer.render([*opening, message], tools=TOOLS, add_generation_prompt=False)
        stop = self._tokenizer.stop_id(tools=TOOLS)
        return message, whole[len(prompt) : len(whole) - whole[::-1].index(stop)]

    def _question(self, content: str) -> Messages:  # with the tool call that follows it
        path, number = f"src/{self._word()}/{self._word()}.py", self._random.randrange(1, 900)
        arguments = json.dumps({"command": f"sed -n {number},{number + 40}p {path}", "timeout_s": 30})
        call = {"id": "call_0", "type": "function", "function": {"name": "run", "arguments": arguments}}
        return [{"role": "user", "content": content}, {**self._assistant(None), "tool_calls": [call]}]

    def _assistant(self, content: str | None) -> dict[str, Any]:
        return {"role": "assistant", "content": content}

    def _prose(self, tokens: int) -> str:
        return self._cut(" ".join(self._word() for _ in range(tokens)), tokens)

    def _log_line(self) -> str:
        seconds, code = self._random.uniform(0, 99), self._random.getrandbits(32)
        text = " ".join(self._word() for _ in range(6))
        return f"{seconds:.3f} {self._word()}.py:{self._random.randrange(900)} [{code:08x}] {text}"

    def _word(self) -> str:
        return self._random.choice(self._words)

    def _cut(self, text: str, tokens: int) -> str:
        """The text's first tokens. ASCII only: there each character of a token string is one of the text."""
        strings = self._tokenizer.token_strings(self._tokenizer.encode(text)[:tokens])
        return text[: sum(map(len, strings))]

    def _count(self, messages: Messages) -> int:
        with_system = [SYSTEM, *messages]
        return len(self._tokenizer.render(with_system, tools=TOOLS, add_generation_prompt=False))
