"""Drafting: guesses the next tokens from text, without MLX or models."""
