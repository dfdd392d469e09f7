"""Python runs this at the start of each process whose PYTHONPATH holds the folder: torch cannot be imported.

transformers imports torch wherever it is installed, which takes seconds in each process.
"""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]  # the import system raises ModuleNotFoundError for None
