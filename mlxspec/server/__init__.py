"""The server: APIs compatible with OpenAI's and Anthropic's, over one scheduler per model."""
