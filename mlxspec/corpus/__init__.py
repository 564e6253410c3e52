"""Texts to draft from: earlier answers, in memory or on disk, and stores, without MLX."""
