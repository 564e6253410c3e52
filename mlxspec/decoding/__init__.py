"""Decoding: the step and the loop around it."""

from .acceptance import accept
from .loop import DecodedStep, RecordTime, decode
from .sampling import Chooser, SamplingParams

__all__ = ["Chooser", "DecodedStep", "RecordTime", "SamplingParams", "accept", "decode"]
