"""From the keys and shapes of a file to a complete plan, or a refusal that lists everything that does not fit."""
