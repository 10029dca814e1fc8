"""Result records as JSON, terminal tables and one HTML page."""
