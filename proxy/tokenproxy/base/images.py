"""Images as clients send them: as base64, in data URLs, or by the address of a server that is allowed.

An image is named by a digest of its bytes. Nothing of it is changed: the engine gets the bytes that came.
"""

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass

from PIL import Image as Pillow
from PIL import UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
"""What is accepted, by Pillow's names."""
_DAMAGED = f"it is damaged, or not one of {', '.join(FORMATS)}"
_DATA = "data:"
MAX_BYTES = 20 * 2**20
"""The largest image, in bytes of its file."""
MAX_PIXELS = 64_000_000
"""Width times height. Pillow opens none with more than 178,956,970."""
_TOO_LARGE = f"it has more than {MAX_BYTES} bytes"


class InvalidImage(Exception):
    """An image cannot be used; the message says why, and what to send."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image."""

    kind: str
    """Its media type, for example `image/png`."""
    data: bytes
    digest: str
    """32 hexadecimal digits: blake2b of the bytes."""

    @property
    def url(self) -> str:
        """The image as a data URL."""
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"


def decode_image(value: str) -> Image:
    """The image in a data URL, or in base64 alone. Decodes the image completely: call it on a thread.

    Raises:
        InvalidImage: it is no image, is damaged, too large, or of another kind.
    """
    encoded = value
    if value[: len(_DATA)].lower() == _DATA:
        head, comma, encoded = value.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise InvalidImage("a data URL must be `data:image/...;base64,` and the image in base64")
    if len(encoded) * 3 // 4 > MAX_BYTES + 2:
        raise InvalidImage(_TOO_LARGE)
    try:
        data = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidImage(f"it is not valid base64: {error}") from error
    return check_image(data)


def check_image(data: bytes) -> Image:
    """The image that some bytes are. Takes milliseconds for each megapixel: call it on a thread.

    Raises:
        InvalidImage: as `decode_image`.
    """
    if not data:
        raise InvalidImage("it is empty")
    if len(data) > MAX_BYTES:
        raise InvalidImage(_TOO_LARGE)
    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            # before it is decoded: Pillow's own check only warns
            if width * height > MAX_PIXELS:
                raise InvalidImage(f"it has {width} x {height} pixels; at most {MAX_PIXELS} are accepted")
            picture.load()
            kind = Pillow.MIME.get(picture.format or "", "image/png")
    except InvalidImage:
        raise
    except UnidentifiedImageError as error:  # whose text names a Python object
        raise InvalidImage(_DAMAGED) from error
    except Exception as error:  # the boundary to Pillow: damaged files raise errors of nearly every type
        raise InvalidImage(f"{_DAMAGED}: {str(error) or type(error).__name__}") from error
    return Image(kind, data, hashlib.blake2b(data, digest_size=16).hexdigest())
