"""Who writes the conversations: an agent that runs commands in a repository, and what they print."""

import json
import random
from typing import Any

from tokenization import ChatTokenizer

RESULT_TOKENS = 200
_SEED = 20
_LINE_TOKENS = 8
"""A line of a log has more."""
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
    """Writes the conversation: always the same, and no text twice."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(_SEED)
        self._words = _VOCABULARY.split()

    def result(self, tokens: int = RESULT_TOKENS, call: str = "call_0") -> Messages:
        """What a command printed: so many tokens."""
        lines = (self._log_line() for _ in range(tokens // _LINE_TOKENS + 1))
        printed = self._cut("\n".join(lines), tokens)
        return [{"role": "tool", "tool_call_id": call, "content": printed}]

    def results(self, count: int, *, new: bool) -> list[Messages]:
        """Different results, or one `count` times."""
        return [self.result() for _ in range(count)] if new else [self.result()] * count

    def history(self, length: int) -> tuple[Messages, list[int]]:
        """Messages that end with a tool call, and their ids as an engine has them: about `length`."""
        messages, fixed = [SYSTEM], self._count([])
        missing = length - fixed
        while True:
            turns = [*self._question(self._prose(30)), *self.result(), self._says(self._prose(120))]
            ending = self._question("")
            size, least = self._count(turns) - fixed, self._count(ending) - fixed
            if size + least > missing:
                break
            messages += turns
            missing -= size
        messages += self._question(self._prose(missing - least))
        ids = self._tokenizer.render(messages, tools=TOOLS, add_generation_prompt=False)
        stop = self._tokenizer.stop_id(tools=TOOLS)
        return messages, ids[: len(ids) - ids[::-1].index(stop)]

    def opening(self, tokens: int) -> Messages:
        """How a conversation begins: with a question of so many tokens."""
        return [SYSTEM, {"role": "user", "content": self._prose(tokens)}]

    def sampled(self, tokens: int) -> tuple[dict[str, Any], list[int]]:
        """What a model says in so many tokens, and a command behind it, with the ids of both."""
        said = self._question("")[1] | {"content": self._prose(tokens)}
        opening = self.opening(1)
        prompt = self._tokenizer.render(opening, tools=TOOLS)
        whole = self._tokenizer.render([*opening, said], tools=TOOLS, add_generation_prompt=False)
        stop = self._tokenizer.stop_id(tools=TOOLS)
        return said, whole[len(prompt) : len(whole) - whole[::-1].index(stop)]

    def _question(self, content: str) -> Messages:
        path, number = f"src/{self._word()}/{self._word()}.py", self._random.randrange(1, 900)
        arguments = json.dumps({"command": f"sed -n {number},{number + 40}p {path}", "timeout_s": 30})
        call = {"id": "call_0", "type": "function", "function": {"name": "run", "arguments": arguments}}
        return [{"role": "user", "content": content}, {**self._says(None), "tool_calls": [call]}]

    def _says(self, content: str | None) -> dict[str, Any]:
        return {"role": "assistant", "content": content}

    def _prose(self, tokens: int) -> str:
        return self._cut(" ".join(self._word() for _ in range(tokens)), tokens)

    def _log_line(self) -> str:
        seconds, code = self._random.uniform(0, 99), self._random.getrandbits(32)
        said = " ".join(self._word() for _ in range(6))
        return f"{seconds:.3f} {self._word()}.py:{self._random.randrange(900)} [{code:08x}] {said}"

    def _word(self) -> str:
        return self._random.choice(self._words)

    def _cut(self, text: str, tokens: int) -> str:
        """The first tokens of a text of ASCII, in which a vocabulary's letter is a letter."""
        spelled = self._tokenizer.token_strings(self._tokenizer.encode(text)[:tokens])
        return text[: sum(map(len, spelled))]

    def _count(self, messages: Messages) -> int:
        together = [SYSTEM, *messages]
        return len(self._tokenizer.render(together, tools=TOOLS, add_generation_prompt=False))
