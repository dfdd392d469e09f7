"""An image in a prompt, as it is planned and recorded."""

import msgspec

from proxy.images import Image


class PromptImage(msgspec.Struct, frozen=True, array_like=True):
    """An image in the ids of a prompt."""

    offset: int
    """Index of its first id in the whole prompt."""
    length: int
    """Number of its ids."""
    digest: str
    """32 hexadecimal digits: blake2b of `data`."""
    kind: str
    """Media type."""
    data: bytes

    @property
    def image(self) -> Image:
        """The image alone."""
        return Image(self.kind, self.data, self.digest)
