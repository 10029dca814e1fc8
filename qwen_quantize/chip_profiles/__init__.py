"""What is publicly known of each chip, with its source, and the arithmetic that follows."""
