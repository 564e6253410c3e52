"""What users call: decoders, their options, sessions and responses."""
