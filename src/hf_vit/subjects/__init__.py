"""One loaded vision model of any library: opening it, its pixels, its features."""
