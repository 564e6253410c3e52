"""Models and tokenizers, from files and from the Hub."""
