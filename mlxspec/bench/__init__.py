"""Measuring and comparing: bench on a model, replay of recorded outputs, and their reports."""
