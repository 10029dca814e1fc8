"""Number formats: what a code means, how a value becomes one, and how scales are chosen."""
