"""Decoding: the step and the loop around it."""

from .acceptance import accept
from .chooser import Chooser
from .loop import DecodedStep, RecordTime, decode
from .sampling import SamplingParams, pure

__all__ = ["Chooser", "DecodedStep", "RecordTime", "SamplingParams", "accept", "decode", "pure"]
