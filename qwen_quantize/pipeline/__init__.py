"""From a user's request to a complete output folder."""
