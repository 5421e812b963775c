"""From the bytes of a sample to its values, by extension, as webdataset decodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainpath.errors import ConfigError, DecodeError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AutoDecoder"]

_PICKLES: Final = frozenset({"pkl", "pickle", "pyd"})
_ARCHIVES: Final = frozenset({"gz", "bz2", "xz", "zst", "lz4"})


class AutoDecoder:
    """Decodes each field of a sample by the last part of its extension.

    Text, numbers, JSON, arrays and images as webdataset does; unknown extensions stay
    bytes. Pickles are refused unless allowed, compressed members always.

    Args:
        image: One of webdataset's image specifications ("pil", "rgb8", "torchrgb8", ...).
        allow_pickle: Whether members may run code of whoever wrote them.
    """

    def __init__(self, *, image: str = "pil", allow_pickle: bool = False) -> None:
        from webdataset.autodecode import IMAGE_EXTENSIONS, imagespecs  # noqa: PLC0415  (slow)

        if image not in imagespecs:
            raise ConfigError(
                f"image={image!r} is unknown; choose one of {', '.join(sorted(imagespecs))}"
            )
        self._image = image
        self._allow_pickle = allow_pickle
        self._image_extensions = frozenset(IMAGE_EXTENSIONS)
        self._decoders: dict[str, Callable[[bytes], Any] | None] = {}

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample with its fields decoded.

        Raises:
            DecodeError: A field cannot be decoded; names shard, key and field.
        """
        for extension, value in sample.items():
            if extension.startswith("__"):
                continue
            try:
                decoder = self._decoders[extension]
            except KeyError:
                decoder = self._decoders[extension] = self._find(extension)
            if decoder is None:
                continue
            try:
                sample[extension] = decoder(value)
            except (MissingDependencyError, DecodeError):
                raise
            except Exception as error:
                raise DecodeError(
                    f"{sample['__key__']}.{extension} of shard {sample['__url__']} cannot be "
                    f"decoded: {type(error).__name__}: {error}"
                ) from error
        return sample

    def _find(self, extension: str) -> Callable[[bytes], Any] | None:
        from webdataset.autodecode import decoders  # noqa: PLC0415  (slow)

        last = extension.rpartition(".")[2]
        if last in _ARCHIVES:
            return _refuse(f"compressed (.{last}); store it plain or pass decode=")
        if last in _PICKLES and not self._allow_pickle:
            return _refuse("a pickle, which can run any code; pass allow_pickle=True to trust it")
        if last == "pth":
            return _load_pth(weights_only=not self._allow_pickle)
        if last in self._image_extensions and last not in decoders:
            return self._decode_image(last)
        found: Callable[[bytes], Any] | None = decoders.get(last)
        return found

    def _decode_image(self, extension: str) -> Callable[[bytes], Any]:
        from webdataset.autodecode import ImageHandler  # noqa: PLC0415  (slow)

        handler = ImageHandler(self._image)

        def decode(data: bytes) -> Any:
            try:
                return handler(f".{extension}", data)
            except ModuleNotFoundError as error:
                raise MissingDependencyError(
                    "decoding images needs Pillow: pip install 'trainpath[images]'"
                ) from error

        return decode


def _refuse(why: str) -> Callable[[bytes], Any]:
    def decode(_data: bytes) -> Any:
        raise ValueError(f"it is {why}")

    return decode


def _load_pth(*, weights_only: bool) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        import io  # noqa: PLC0415

        import torch  # noqa: PLC0415

        return torch.load(io.BytesIO(data), weights_only=weights_only, map_location="cpu")

    return decode
