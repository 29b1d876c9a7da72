"""What was measured and how it is shown: records, files of results, figures, reports."""
