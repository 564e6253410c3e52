"""mlx-lm's functions under their own names, with drafts."""
