"""Planning: what a step costs. Knows no MLX and no model."""

from .step_times import StepTime, StepTimes

__all__ = ["StepTime", "StepTimes"]
