"""OpenAI's API for chats and completions."""
