"""Texts to draft from: earlier answers, in memory or on disk, and stores. MLX is not imported."""
