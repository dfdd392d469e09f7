"""Records for which templates vLLM passes content as parts: needs vLLM.

python -m tests.support.templates.record_formats   writes tests/templates/takes_parts.txt
"""

from collections.abc import Iterable

from tests.support.templates.corpus import ChatTemplate, corpus, digest
from tests.support.templates.engine import TAKES_PARTS_FILE


def detected_digests(templates: Iterable[ChatTemplate]) -> set[str]:
    """Digests of those templates that take parts, as vLLM detects it."""
    from vllm.renderers.hf import _detect_content_format

    return {
        digest(template.text)
        for template in templates
        if _detect_content_format(template.text, default="string") == "openai"
    }


if __name__ == "__main__":
    TAKES_PARTS_FILE.write_text("\n".join(sorted(detected_digests(corpus()))) + "\n")
