"""What a hostile repository, data set or server holds, for `campaigns.hostile`."""
