"""The decoder: configuration, layers, sharding, FLOP counts and sampling."""
