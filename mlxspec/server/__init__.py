"""The server: an OpenAI-compatible API over the scheduler of joint steps."""
