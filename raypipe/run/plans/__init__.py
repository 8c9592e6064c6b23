"""Plans of a run: the first plan, later plans for other workers, and their assembly to the workers' configuration."""
