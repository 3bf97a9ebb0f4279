"""torch's own module surfaces, on rekindle's engine, and what puts them in torch's place."""
