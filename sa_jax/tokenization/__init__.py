"""Text to token ids and back: plain bytes, and published tokenizers by path."""
