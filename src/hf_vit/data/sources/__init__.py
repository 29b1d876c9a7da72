"""Where images are read from: folders, lists, files and data sets of the Hub, into tables or streams."""
