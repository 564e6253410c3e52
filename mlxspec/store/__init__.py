"""Stores: texts on disk that drafts are drawn from, searched without loading them. No MLX here."""
