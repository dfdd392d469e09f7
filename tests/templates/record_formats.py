"""Records for which templates vLLM passes content as parts: needs vLLM.

python -m tests.templates.record_formats   writes tests/templates/takes_parts.txt
"""

from tests.templates.corpus import corpus, digest
from tests.templates.engine import TAKES_PARTS_FILE


def detected_digests() -> set[str]:
    """Digests of the templates that take parts, as vLLM detects it."""
    from vllm.renderers.hf import _detect_content_format

    return {
        digest(template.text)
        for template in corpus()
        if _detect_content_format(template.text, default="string") == "openai"
    }


if __name__ == "__main__":
    TAKES_PARTS_FILE.write_text("\n".join(sorted(detected_digests())) + "\n")
