"""Results and how they are written: records, figures, reports, and files that appear complete or not at all."""
