"""The architectures that are followed, by name."""

from collections.abc import Mapping

from architecture import Architecture
from by_hand import DECODERS, ENCODERS, PAIRS, SOUND, TOWERS, VISION
from diffusing_models import DIFFUSERS

ZOO: Mapping[str, Architecture] = {
    one.name: one for one in (*DECODERS, *ENCODERS, *PAIRS, *VISION, *SOUND, *TOWERS, *DIFFUSERS)
}
