"""Planning: what a step costs, and what to draft at that price. Knows no MLX and no model."""
