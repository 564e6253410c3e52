"""Drafting: guesses the next tokens from text. Imports neither MLX nor models."""
