"""Earlier answers and added texts to draft from, in memory or on disk. MLX is not imported."""
