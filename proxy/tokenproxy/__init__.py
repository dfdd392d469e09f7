"""tokenproxy: a token-exact proxy for LLM rollouts, inside vLLM or in front of it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("tokenproxy")
except PackageNotFoundError:  # running from a source tree that is not installed
    __version__ = "0.0.0"
