"""The blocks of code of the pages, and the commands in those of a shell."""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenproxy.cli.flags import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), ROOT / "examples" / "README.md"]
OUR_ADDRESS = re.compile(r"(?<=//)(?:127\.0\.0\.1|localhost):8100|(?<= )localhost:8100")
"""Of a proxy that was started as the pages tell."""
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_ENDS = {"&", "&&", "|", ";", ">"}

NOT_HERE = {
    "README.md": {"ChatTokenizer.load(": "it names a placeholder of a folder, and ids of no request"},
    "docs/images.md": {
        "iVBORw0KGgo..": "its image is cut off; tests/campaign/real_vllm/test_images.py sends whole ones"
    },
    "docs/trainers/agent-lightning.md": {
        "agentlightning": "Agent Lightning is not installed",
        "agl:8080": "it is sent to Agent Lightning's server",
    },
    "docs/trainers/openenv.md": {"openenv": "test_clients.py of tests/campaign/real_vllm runs it"},
    "docs/trainers/rllm.md": {"rllm.gateway": "test_clients.py of tests/campaign/real_vllm runs it"},
    "docs/trainers/trl.md": {"rollout_func": "tests/contract/samples/test_trainer_pages.py runs it"},
    "docs/trainers/verl.md": {
        "verl.experimental": "tests/contract/samples/test_trainer_pages.py runs it",
        "ray.init": "it needs a cluster; tests/campaign/ray/test_verl.py runs it",
    },
    "docs/kubernetes.md": {"kubectl get --raw": "it needs a cluster"},
    "docs/samples.md": {'open("samples.jsonl")': "it reads a file that an export wrote"},
}
"""By page: words of the blocks and commands that do not run in a test of all pages, and why."""


@dataclass(frozen=True)
class Snippet:
    """A block of code, or one command of it."""

    page: str
    language: str
    code: str

    @property
    def name(self) -> str:
        """For the id of a test."""
        return f"{self.page}: {self.code.strip().partition(chr(10))[0][:60]}"

    @property
    def runs(self) -> bool:
        """Whether it is none of `NOT_HERE`."""
        return not any(words in self.code for words in NOT_HERE.get(self.page, ()))

    def at(self, url: str) -> str:
        """Its code for a proxy of this URL."""
        return OUR_ADDRESS.sub(url.partition("//")[2].rstrip("/"), self.code)

    @property
    def arguments(self) -> list[str]:
        """Those with which a command starts tokenproxy; empty if it does not."""
        words = shlex.split(self.code, comments=True)
        start = next(
            (
                at
                for at, pair in enumerate(pairwise(words))
                if pair[0] == "tokenproxy" and pair[1] in ("vllm", *COMMANDS)
            ),
            None,
        )
        rest = words[start + 1 :] if start is not None else []
        return rest[: next((at for at, word in enumerate(rest) if word in _ENDS), None)]


def blocks() -> list[Snippet]:
    """All blocks of all pages."""
    found = []
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        found += [Snippet(name, *groups) for groups in _BLOCK.findall(page.read_text())]
    return found


def programs() -> list[Snippet]:
    """The blocks of Python that run."""
    return [each for each in blocks() if each.language == "python" and each.runs]


def commands() -> list[Snippet]:
    """The commands of all blocks of a shell. In a session of a terminal they begin with `$ `."""
    found = []
    for block in blocks():
        lines = re.sub(r"\\\n\s*", "", block.code).splitlines()
        if block.language == "console":
            found += [Snippet(block.page, "sh", line[2:]) for line in lines if line.startswith("$ ")]
        elif block.language == "sh":
            found.append(Snippet(block.page, "sh", block.code))
    return [each for each in found if each.runs]
