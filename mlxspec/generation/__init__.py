"""The Python interface: decoders, their options, sessions and responses."""
