"""Results and how they are written: records, figures, reports, and folders that appear complete or not at all."""
