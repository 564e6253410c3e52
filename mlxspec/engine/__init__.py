"""The engine: one step at a time, propose, verify, accept, commit."""
