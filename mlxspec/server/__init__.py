"""The server: an OpenAI-compatible API over an engine of joint steps."""
