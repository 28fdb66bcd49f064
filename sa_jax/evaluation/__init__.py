"""How good a model is: perplexity, and what counting reaches."""
