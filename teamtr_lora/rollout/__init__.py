"""Playing episodes: the Sampler contract, its engines, and the collector that moves every episode along."""
