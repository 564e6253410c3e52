"""Measuring: is the output the same, and how much faster did it come."""
