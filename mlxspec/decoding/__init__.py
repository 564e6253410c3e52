"""Decoding: the step and the loop around it."""

from .acceptance import accept
from .loop import DecodedStep, decode
from .sampling import Chooser, SamplingParams

__all__ = ["Chooser", "DecodedStep", "SamplingParams", "accept", "decode"]
