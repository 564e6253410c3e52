"""Replay: recorded outputs through the drafters that decode, without a model."""
