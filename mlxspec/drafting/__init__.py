"""Drafting: guessing the next tokens from text. Knows no MLX and no model."""
