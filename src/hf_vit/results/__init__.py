"""What was measured and how it is shown: records, figures, reports; and how outputs are written in one move."""
