"""What models there are: the papers' variants, folders, and repositories of the Hub; as a table, as JSON, as a page."""
